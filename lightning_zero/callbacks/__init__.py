"""Callbacks that know what ZeRO shards."""
