"""`from_pretrained` in `configure_model` at stage 3, as if nothing were sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero import ZeroStrategy
from tests import pretrained
from tests.harness import ranks
from tests.models import largest_difference, trainer, whole_weights

NAMES = ("llama", "bert", "t5", "vit", "mixtral")


@ranks(1, 2, 3)
def test_values_and_losses_are_those_of_stage_0(world_size: int) -> None:
    """M1, W1: models read from sharded safetensors are partitioned, hold what was saved, and learn as at stage 0."""
    whole = pretrained.whole_models()
    pretrained.save(whole, max_shard_size="4KB")
    losses = {}
    for stage in (3, 0):
        module = pretrained.Pretrained(*NAMES)
        held: dict[str, int] = {}
        initial: dict[str, Tensor] = {}

        def look(module: Any = module, held: Any = held, initial: Any = initial) -> None:
            held.update({name: parameter.numel() for name, parameter in module.named_parameters()})
            initial.update(whole_weights(module.nets))

        module.on_fit_start = look  # type: ignore[method-assign]
        run = trainer(ZeroStrategy(stage=stage), epochs=1, devices=world_size)
        run.fit(module, pretrained.tokens(10, ranks=world_size))
        losses[stage] = module.losses
        expected = dict(torch.nn.ModuleDict(whole).named_parameters())
        assert initial.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(initial[name], value), (stage, name)
        assert largest_difference(initial, whole_weights(module.nets)) > 0.01  # it did train
        assert (set(held.values()) == {0}) == (stage == 3)
    assert len(losses[3]) == 10
    for ours, theirs in zip(losses[3], losses[0], strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)
