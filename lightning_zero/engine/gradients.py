"""Norms of gradients, before clipping, from the part that each rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_zero._compat.deepspeed_gradients import is_spread, loss_scale, own_gradient
from lightning_zero._compat.deepspeed_masters import own_range

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

__all__ = ["layer_norms", "layers", "loss_scale", "norm_of_the_update", "norm_of_whole_gradients"]


def norm_of_the_update(engine: DeepSpeedEngine) -> float | None:
    """Norm of all gradients of the last update, which ZeRO and 16-bit optimizers compute anyway; not collective.

    None at stage 0 in fp32, and where the config says ``compute_grad_norm: false``.
    """
    norm = engine.get_global_grad_norm()
    return None if norm is None else float(norm)


def norm_of_whole_gradients(module: Module) -> float | None:
    """Norm of all gradients where every rank holds them whole and nobody has computed it: stage 0 in fp32.

    Args:
        module: The module, between the last backward of a window and the step.
    """
    gradients = [p.grad for p in module.parameters() if p.grad is not None and not is_spread(p)]
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else None


def layers(module: Module) -> dict[str, list[Parameter]]:
    """The trainable parameters of each layer: a member of a list or sequence of modules, or what stands outside one.

    Args:
        module: The module; ``net.model.layers.0.mlp.up_proj.weight`` belongs to ``net.model.layers.0``.
    """
    found: dict[str, list[Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            found.setdefault(_layer(name), []).append(parameter)
    return found


def _layer(name: str) -> str:
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:-1]) or name


def layer_norms(engine: DeepSpeedEngine, of: Mapping[str, Sequence[Parameter]]) -> dict[str, float]:
    """The norm of each layer's gradient, before clipping, by one all-reduce of a number for each layer. Collective.

    Args:
        engine: The engine, between the last backward of a window and the step.
        of: Parameters by layer, the same on all ranks.
    """
    squares = torch.stack([_own_square(parameters, engine.device) for parameters in of.values()])
    if any(is_spread(parameter) for parameters in of.values() for parameter in parameters):
        dist.all_reduce(squares)
    norms = squares.sqrt() / (loss_scale(engine) or 1.0)
    return dict(zip(of, norms.tolist(), strict=True))


def _own_square(parameters: Iterable[Parameter], device: torch.device | str) -> Tensor:
    total = torch.zeros((), dtype=torch.float32, device=device)
    for parameter in parameters:
        gradient = _own(parameter)
        if gradient is not None and gradient.numel():
            total += torch.linalg.vector_norm(gradient.float()).square().to(device)
    return total


def _own(parameter: Parameter) -> Tensor | None:
    if not is_spread(parameter):
        return parameter.grad
    share = own_gradient(parameter)
    return own_range(parameter, share)[1] if share is not None and hasattr(parameter, "ds_id") else share
