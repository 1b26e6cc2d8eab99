"""Thin adapters: what Lightning asks of a strategy, answered by the engine."""
