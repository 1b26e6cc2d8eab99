"""Tests of lightning_zero.strategies."""
