"""Tests of transformers models in a run."""
