"""Fabric's DeepSpeed precision plugin, with metric states that keep fp32."""

from __future__ import annotations

import torch
from lightning.fabric.plugins import DeepSpeedPrecision
from torch.nn import Module
from typing_extensions import override

from lightning_zero._compat.torchmetrics import keep_states_in_fp32
from lightning_zero.strategies.precision import tell_of_saved_types

_WEIGHTS = {"32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}


class FabricZeroPrecision(DeepSpeedPrecision):
    """What a model is made ready by; the engine does the rest.

    Args:
        precision: ``32-true``, ``16-mixed``, ``16-true``, ``bf16-mixed`` or ``bf16-true``.
    """

    @override
    def convert_module(self, module: Module) -> Module:
        tell_of_saved_types(module, _WEIGHTS[self.precision.partition("-")[0]], precision=self.precision)
        converted = super().convert_module(module)
        keep_states_in_fp32(converted)
        return converted
