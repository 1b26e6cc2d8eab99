"""Tests that start processes as a user does."""
