"""Training under ZeRO gives what ``strategy="ddp"`` gives, update by update."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from lightning_zero import ZeroStrategy
from tests.harness import ranks
from tests.models import Regression, largest_difference, loader, trainer, whole_weights

TOLERANCE = {"sgd": 1e-6, "adamw": 1e-5}


@dataclass
class Trained:
    """What a training leaves behind."""

    weights: dict[str, Tensor]
    global_step: int
    lrs: list[float]
    hooks: list[str]
    losses: list[float]


def train(strategy: Any, optimizer: str, *, twice: bool = False, **flags: Any) -> Trained:
    module = Regression(optimizer, twice=twice)
    runner = trainer(strategy, **flags)
    runner.fit(module, loader())
    return Trained(whole_weights(module), runner.global_step, module.lrs, module.hooks, module.losses)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks(2, timeout=300)
def test_updates_equal_ddp(stage: int) -> None:
    """A1-A3: weights, global_step, LR history, hooks and losses equal ddp's, also when N does not divide the epoch."""
    for optimizer, accumulate, clip in itertools.product(("sgd", "adamw"), (1, 2, 4), (None, 0.1)):
        flags = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
        expected = train("ddp", optimizer, **flags)
        actual = train(ZeroStrategy(stage=stage), optimizer, **flags)
        case = f"stage {stage}, {optimizer}, {flags}"
        assert largest_difference(actual.weights, expected.weights) < TOLERANCE[optimizer], case
        assert actual.global_step == expected.global_step, case
        assert actual.lrs == pytest.approx(expected.lrs), case
        assert actual.hooks == expected.hooks, case
        assert actual.losses == pytest.approx(expected.losses, abs=1e-5), case
