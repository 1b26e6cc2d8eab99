"""Tests of `lightning_zero.engine`."""
