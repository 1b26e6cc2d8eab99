"""DeepSpeed ZeRO for PyTorch Lightning, by one word: ``strategy="zero3_offload"``, in the Trainer and in Fabric.

Importing this package registers the strategy names.
"""

from __future__ import annotations

import typing as _typing

from lightning_zero.callbacks.best_model import BestModelCheckpoint
from lightning_zero.callbacks.gathered_weights import GatheredWeightsCheckpoint
from lightning_zero.callbacks.monitor import ZeroMonitor
from lightning_zero.checkpoint.consolidate import consolidate, load_full_state_dict
from lightning_zero.checkpoint.verify import inspect_checkpoint, verify_checkpoint
from lightning_zero.config.facts import RunFacts
from lightning_zero.config.resolve import ResolvedConfig, resolve_config
from lightning_zero.errors import CheckpointError, ConfigError, ZeroError
from lightning_zero.strategies.environment import DeepSpeedEnvironment
from lightning_zero.strategies.fabric import FabricZeroStrategy
from lightning_zero.strategies.loading import load_from_checkpoint
from lightning_zero.strategies.registry import register as _register
from lightning_zero.strategies.trainer import ZeroStrategy

if _typing.TYPE_CHECKING:
    from lightning_zero.cli.zero_cli import ZeroCLI

__all__ = [
    "BestModelCheckpoint",
    "CheckpointError",
    "ConfigError",
    "DeepSpeedEnvironment",
    "FabricZeroStrategy",
    "GatheredWeightsCheckpoint",
    "ResolvedConfig",
    "RunFacts",
    "ZeroCLI",
    "ZeroError",
    "ZeroMonitor",
    "ZeroStrategy",
    "consolidate",
    "inspect_checkpoint",
    "load_from_checkpoint",
    "load_full_state_dict",
    "resolve_config",
    "verify_checkpoint",
]

_register()


def __getattr__(name: str) -> object:
    if name == "ZeroCLI":  # LightningCLI and its parser are imported by those who use it
        from lightning_zero.cli.zero_cli import ZeroCLI

        return ZeroCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
