"""Tests of lightning_zero.callbacks."""
