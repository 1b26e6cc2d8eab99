"""What libraries on top of torch tell a run about their models."""
