"""Tests of `lightning_zero.cli`."""
