"""Tiny checkpoints, and the script that makes them."""
