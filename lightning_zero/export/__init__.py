"""Whole weights to the formats that others read: pure, without Lightning, DeepSpeed or transformers."""
