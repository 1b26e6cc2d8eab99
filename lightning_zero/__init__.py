"""DeepSpeed ZeRO for PyTorch Lightning, by one word: ``Trainer(strategy="zero3_offload")``.

Importing this package registers the strategy names.
"""

from __future__ import annotations

from lightning_zero.callbacks.best_model import BestModelCheckpoint
from lightning_zero.config.facts import RunFacts
from lightning_zero.config.resolve import ResolvedConfig, resolve_config
from lightning_zero.errors import CheckpointError, ConfigError, ZeroError
from lightning_zero.strategies.registry import register as _register
from lightning_zero.strategies.trainer import ZeroStrategy

__all__ = [
    "BestModelCheckpoint",
    "CheckpointError",
    "ConfigError",
    "ResolvedConfig",
    "RunFacts",
    "ZeroError",
    "ZeroStrategy",
    "resolve_config",
]

_register()
