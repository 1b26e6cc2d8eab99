"""Programs and modules to start from."""
