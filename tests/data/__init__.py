"""Committed inputs of tests."""
