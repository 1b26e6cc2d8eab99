"""Tests of `lightning_zero.checkpoint`."""
