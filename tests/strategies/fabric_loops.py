"""Hand-written loops under Fabric, as users write them, for any strategy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from tests.models import body, loader, whole_weights


def launched(strategy: Any, *, devices: int = 2, **flags: Any) -> Fabric:
    """A CPU Fabric whose ranks have met."""
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=devices, **flags)
    fabric.launch()
    return fabric


def optimizer_for(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizers of the Trainer's parity tests."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


@dataclass
class Looped:
    """What a loop leaves behind."""

    weights: dict[str, Tensor]
    lrs: list[float]
    norms: list[float]


def train(
    fabric: Fabric,
    optimizer_name: str = "adamw",
    *,
    accumulate: int = 1,
    clip: float | None = None,
    blocking: bool = True,
    abandon: bool = False,
    build: Callable[[], nn.Module] = body,
    epochs: int = 2,
) -> Looped:
    """Fabric's documented accumulation loop, with a scheduler that the user steps.

    Args:
        fabric: A launched Fabric.
        optimizer_name: ``sgd`` or ``adamw``.
        accumulate: Micro-batches in one update; leftovers at an epoch's end make none.
        clip: Largest gradient norm.
        blocking: Whether ``no_backward_sync`` is used.
        abandon: Whether a backward pass before each window is dropped by ``zero_grad``.
        build: Makes the model.
        epochs: Rounds over six batches.
    """
    with fabric.init_module():
        network = build()
    raw = optimizer_for(optimizer_name, network)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(raw, 0.9)
    model, optimizer = fabric.setup(network, raw)
    batches = fabric.setup_dataloaders(loader())
    result = Looped({}, [], [])
    for count, (rows, targets) in enumerate(itertools.chain(*(batches for _ in range(epochs))), start=1):
        accumulating = count % accumulate != 0
        if abandon and count % accumulate == 1:
            fabric.backward(model(rows).pow(2).sum())
            optimizer.zero_grad()
        with fabric.no_backward_sync(model, enabled=accumulating and blocking):
            fabric.backward(nn.functional.mse_loss(model(rows), targets) / accumulate)
        if accumulating:
            continue
        norm = None if clip is None else fabric.clip_gradients(model, optimizer, max_norm=clip)
        optimizer.step()
        if norm is not None:
            result.norms.append(norm.item())
        result.lrs.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
        optimizer.zero_grad()
    result.weights = whole_weights(network)
    if hasattr(fabric.strategy, "release"):
        fabric.strategy.release()
    return result
