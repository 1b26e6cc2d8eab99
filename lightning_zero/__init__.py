"""DeepSpeed ZeRO for PyTorch Lightning, by one word: ``Trainer(strategy="zero3_offload")``.

Importing this package registers the strategy names.
"""

from __future__ import annotations

from lightning_zero.callbacks.best_model import BestModelCheckpoint
from lightning_zero.callbacks.gathered_weights import GatheredWeightsCheckpoint
from lightning_zero.checkpoint.consolidate import consolidate, load_full_state_dict
from lightning_zero.checkpoint.verify import inspect_checkpoint, verify_checkpoint
from lightning_zero.config.facts import RunFacts
from lightning_zero.config.resolve import ResolvedConfig, resolve_config
from lightning_zero.errors import CheckpointError, ConfigError, ZeroError
from lightning_zero.strategies.environment import DeepSpeedEnvironment
from lightning_zero.strategies.loading import load_from_checkpoint
from lightning_zero.strategies.registry import register as _register
from lightning_zero.strategies.trainer import ZeroStrategy

__all__ = [
    "BestModelCheckpoint",
    "CheckpointError",
    "ConfigError",
    "DeepSpeedEnvironment",
    "GatheredWeightsCheckpoint",
    "ResolvedConfig",
    "RunFacts",
    "ZeroError",
    "ZeroStrategy",
    "consolidate",
    "inspect_checkpoint",
    "load_from_checkpoint",
    "load_full_state_dict",
    "resolve_config",
    "verify_checkpoint",
]

_register()
