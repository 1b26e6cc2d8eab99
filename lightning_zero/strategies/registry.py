"""The strategy names in Lightning's registries."""

from __future__ import annotations

from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_zero.strategies.fabric import FabricZeroStrategy
from lightning_zero.strategies.foreign import refuse_names
from lightning_zero.strategies.trainer import ZeroStrategy

NAMES = {
    "zero1": "ZeRO stage 1: optimizer states sharded",
    "zero1_offload": "ZeRO stage 1, optimizer states in host memory",
    "zero2": "ZeRO stage 2: optimizer states and gradients sharded",
    "zero2_offload": "ZeRO stage 2, optimizer states in host memory",
    "zero3": "ZeRO stage 3: optimizer states, gradients and parameters sharded",
    "zero3_offload": "ZeRO stage 3, optimizer states and parameters in host memory",
    "zero3_nvme": "ZeRO stage 3, optimizer states and parameters on NVMe",
}


def register() -> None:
    """Makes ``strategy="zero3_offload"`` and its like work, in Trainer and Fabric. Twice changes nothing."""
    registries: tuple[tuple[Any, type], ...] = (
        (StrategyRegistry, ZeroStrategy),
        (STRATEGY_REGISTRY, FabricZeroStrategy),
    )
    for registry, strategy in registries:
        for name, description in NAMES.items():
            if name not in registry:
                registry.register(name, strategy, description=description, preset=name)
    refuse_names(NAMES)
