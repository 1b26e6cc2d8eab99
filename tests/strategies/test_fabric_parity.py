"""A hand-written loop under ZeRO gives what Fabric's ``ddp`` gives, update by update."""

from __future__ import annotations

import itertools

import pytest

from lightning_zero import FabricZeroStrategy
from tests.harness import ranks
from tests.models import largest_difference
from tests.strategies.fabric_loops import launched, train

TOLERANCE = {"sgd": 1e-6, "adamw": 1e-5}


@ranks(2, timeout=400)
def test_updates_equal_ddp() -> None:
    """A7, A9: weights, learning rates and gradient norms equal ddp's, at stages 0-3, N 1 and 4, clipped or not."""
    for optimizer, accumulate, clip in itertools.product(("sgd", "adamw"), (1, 4), (None, 0.1)):
        expected = train(launched("ddp"), optimizer, accumulate=accumulate, clip=clip)
        for stage in (0, 1, 2, 3):
            for blocking in (True, False) if accumulate > 1 else (True,):
                fabric = launched(FabricZeroStrategy(stage=stage))
                actual = train(fabric, optimizer, accumulate=accumulate, clip=clip, blocking=blocking)
                case = (stage, optimizer, accumulate, clip, blocking)
                assert actual.lrs == expected.lrs, case
                assert actual.norms == pytest.approx(expected.norms, rel=1e-5), case
                assert largest_difference(actual.weights, expected.weights) < TOLERANCE[optimizer], case


@ranks(2, timeout=400)
def test_offload_and_abandoned_windows() -> None:
    """A9: with CPU offload, too, four backward passes add up, and a window that is abandoned leaves nothing behind."""
    for abandon in (False, True):
        expected = train(launched("ddp"), accumulate=4, clip=0.1, abandon=abandon)
        for strategy in ("zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload"):
            actual = train(launched(strategy), accumulate=4, clip=0.1, abandon=abandon)
            assert actual.norms == pytest.approx(expected.norms, rel=1e-5), (strategy, abandon)
            assert largest_difference(actual.weights, expected.weights) < 1e-5, (strategy, abandon)
