"""What each rank really holds, and how a model comes to be sharded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import ConfigError, ZeroStrategy
from tests.harness import ranks
from tests.models import Regression, largest_difference, loader, trainer, whole_weights

WIDE = 32


class Swapped(Regression):
    """Shards of more than the 1 MB below which DeepSpeed keeps them in memory."""

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(1)
            self.net = nn.Sequential(
                nn.Linear(7, self.width), nn.Tanh(), nn.Linear(self.width, 512), nn.Tanh(), nn.Linear(512, 3)
            )

    width = 2048


class Wide(Regression):
    """Many layers of one size, so that few of them lie across the border of two shards."""

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(1)
            middle = [nn.Linear(WIDE, WIDE) for _ in range(60)]
            self.net = nn.Sequential(nn.Linear(7, WIDE), *middle, nn.Linear(WIDE, 3))

    def on_after_backward(self) -> None:
        super().on_after_backward()
        if self.gradient_bytes is None:  # the first of a window of two: between two backwards
            self.gradient_bytes = _gradient_bytes(self.trainer.model)

    gradient_bytes: int | None = None


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of distinct storages: views of one buffer count once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(size for address, size in storages.items() if address)


def _gradient_bytes(engine: Any) -> int:
    """Bytes of gradients that are kept from one backward pass to the next."""
    optimizer = engine.optimizer
    kept: list[Tensor | None] = [parameter.grad for parameter in engine.module.parameters()]
    for held in (optimizer.averaged_gradients, getattr(optimizer, "all_grad_tensors", {})):
        for group in held.values():
            kept.extend(group or [])
    return _bytes(kept)


def _parameter_bytes(engine: Any) -> int:
    shards = [getattr(parameter, "ds_tensor", parameter) for parameter in engine.module.parameters()]
    return _bytes([shard.data for shard in shards])


def _state_bytes(engine: Any) -> int:
    states = engine.basic_optimizer.state.values()
    return _bytes(value for state in states for value in state.values() if isinstance(value, Tensor) and value.dim())


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2, 3)
def test_bytes_held_by_each_rank(stage: int, world_size: int) -> None:
    """Each stage shards what the ZeRO table says: optimizer states, then gradients, then parameters, by 1/N."""
    module = Wide("adamw")
    overrides = {"zero_optimization.stage3_param_persistence_threshold": 0, "zero_optimization.reduce_bucket_size": 100}
    runner = trainer(
        ZeroStrategy(stage=stage, overrides=overrides), devices=world_size, epochs=1, accumulate_grad_batches=2
    )
    runner.fit(module, loader(2, ranks=world_size))
    weights = 4 * sum(p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in module.parameters())
    share = 1 / world_size
    engine = runner.model
    held = (_parameter_bytes(engine) / weights, module.gradient_bytes / weights, _state_bytes(engine) / (2 * weights))
    expected = {1: (1, 1, share), 2: (1, share, share), 3: (share, share, share)}[stage]
    assert held == pytest.approx(expected, rel=0.05)


@ranks(2)
def test_configure_model_builds_shards() -> None:
    """Parameters made in ``configure_model`` at stage 3 hold no elements outside a gather, and no warning is given."""

    class Looks(Regression):
        def setup(self, stage: str) -> None:
            assert self.net is None

        def configure_model(self) -> None:
            super().configure_model()
            self.held = [parameter.numel() for parameter in self.parameters()]

    module = Looks()
    overrides = {"zero_optimization.stage3_param_persistence_threshold": 0}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*exist whole on every rank.*")
        trainer(ZeroStrategy(stage=3, overrides=overrides)).fit(module, loader())
    assert module.held == [0] * len(module.held)
    assert all(parameter.numel() == 0 for parameter in module.parameters())


@ranks(2)
def test_model_built_in_init_is_warned_about() -> None:
    """M8: a model that exists whole before stage 3 starts is warned about, with its size and the remedy."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(ZeroStrategy(stage=3)).fit(Regression(born_sharded=False), loader())
    said = [str(w.message) for w in caught if "146 parameters of Regression exist whole" in str(w.message)]
    assert len(said) == (1 if os.environ["RANK"] == "0" else 0)
    assert all("configure_model" in message for message in said)


@ranks(2)
def test_stage_2_after_stage_3_starts_from_whole_weights() -> None:
    """A module born sharded in a stage-3 run trains at stage 2 afterwards, from the trained weights."""
    module = Regression("sgd")
    trainer(ZeroStrategy(stage=3)).fit(module, loader())
    weights = whole_weights(module)
    trainer(ZeroStrategy(stage=2)).validate(module, loader(), verbose=False)
    assert largest_difference(dict(module.named_parameters()), weights) == 0  # type: ignore[arg-type]
    runner = trainer(ZeroStrategy(stage=2))
    runner.fit(module, loader())
    assert runner.global_step == 12
    assert largest_difference(whole_weights(module), weights) > 0


@ranks(2)
def test_nvme_trains_as_cpu_offload_does(nvme_ops: None, tmp_path: Path) -> None:
    """Optimizer states and parameters on NVMe give the weights that CPU offload gives, and a checkpoint is written."""
    trained = []
    for preset in ("zero3_offload", "zero3_nvme"):
        module = Swapped("sgd")
        path = tmp_path / "swap" if preset == "zero3_nvme" else None
        runner = trainer(ZeroStrategy(preset=preset, nvme_path=path), epochs=1)
        runner.fit(module, loader())
        trained.append(whole_weights(module))
        runner.save_checkpoint(tmp_path / f"{preset}.ckpt")
        assert (tmp_path / f"{preset}.ckpt" / "latest").exists()
    assert largest_difference(*trained) < 1e-6
    assert any((tmp_path / "swap").rglob("*_gradient_*.swp"))


@ranks(2)
def test_nvme_refuses_gradients_that_deepspeed_would_misread(nvme_ops: None, tmp_path: Path) -> None:
    """Gradient shards that start inside a disk block are refused by name, since DeepSpeed reads them wrong."""
    module = Swapped("sgd")
    module.width = 2044
    with pytest.raises(ConfigError, match=r"gradients of 1 parameters wrong, net\.2\.weight.*offload_optimizer='cpu'"):
        trainer(ZeroStrategy(preset="zero3_nvme", nvme_path=tmp_path)).fit(module, loader())
    assert module.losses == []
