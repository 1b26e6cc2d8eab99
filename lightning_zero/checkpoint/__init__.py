"""Shards on disk to whole weights: pure, without Lightning or DeepSpeed."""
