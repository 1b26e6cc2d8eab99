"""torchmetrics' undocumented ways, each with what it is, why it is needed and where it was last seen (1.9)."""

from __future__ import annotations

import torch
from torch.nn import Module, Parameter


def keep_states_in_fp32(module: Module) -> None:
    """Makes the 16-bit states of the metrics in a module fp32 again, with their defaults.

    A sum in bf16 stops to grow at 256 ones. ``Metric`` guards its states against ``half()`` and ``bfloat16()``, but not
    against ``to(dtype)``. ``set_dtype``, the public way, would turn integer states into fp32 too; ``_apply``, through
    which all of these go, takes any function. Parameters of a metric are the engine's.

    Args:
        module: A module with metrics at any depth.
    """
    from torchmetrics import Metric

    for child in module.modules():
        if isinstance(child, Metric):
            child._apply(_widened)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, Parameter) or tensor.dtype not in (torch.bfloat16, torch.float16):
        return tensor
    return tensor.float()
