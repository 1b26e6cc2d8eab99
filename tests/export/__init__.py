"""Tests of `lightning_zero.export`."""
