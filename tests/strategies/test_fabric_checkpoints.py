"""Saving and loading under Fabric: what was saved is what comes back, in Fabric, in a Trainer and as single files."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_zero import CheckpointError, ConfigError, FabricZeroStrategy, ZeroStrategy, inspect_checkpoint
from tests.harness import ranks
from tests.models import Regression, body, largest_difference, loader, trainer, whole_weights
from tests.strategies.fabric_loops import launched, optimizer_for

STAGES = [0, 1, 2, 3]


class Loop:
    """A Fabric, what it has set up, and how far it has come.

    Args:
        strategy: Of the Fabric.
        network: A module; its own ``net`` is built here when it is a LightningModule.
    """

    def __init__(self, strategy: Any, network: nn.Module | None = None, **flags: Any) -> None:
        self.fabric = launched(strategy, **flags)
        with self.fabric.init_module():
            self.network = body() if network is None else network
            if isinstance(network, Regression):
                network.configure_model()
        raw = optimizer_for("adamw", self.network)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(raw, 0.9)
        self.model, self.optimizer = self.fabric.setup(self.network, raw)
        self.batches = list(self.fabric.setup_dataloaders(loader()))

    def run(self, start: int, stop: int) -> dict[str, Tensor]:
        for rows, targets in self.batches[start:stop]:
            self.fabric.backward(nn.functional.mse_loss(self.model(rows), targets))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return whole_weights(self.network)

    def state(self, **more: Any) -> dict[str, Any]:
        """Names as in Lightning's examples; DeepSpeed has an entry called ``lr_scheduler``, too."""
        return {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.scheduler, **more}

    def lr(self) -> float:
        rate: float = self.optimizer.param_groups[0]["lr"]
        return rate


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_save_and_load(stage: int, tmp_path: Path) -> None:
    """A loop that goes on from a checkpoint ends where the uninterrupted one does, and an overwriting save is whole."""
    path = tmp_path / "loop.ckpt"
    through = Loop(FabricZeroStrategy(stage=stage))
    through.run(0, 2)
    through.fabric.save(path, through.state(step=2))
    through.run(2, 3)
    through.fabric.save(path, through.state(step=3, notes={"keep": 1, "drop": 2}), {"notes": lambda k, _: k == "keep"})
    expected = through.run(3, 6)

    again = Loop(FabricZeroStrategy(stage=stage))
    again.run(4, 6)
    again.fabric.backward(again.model(again.batches[0][0]).sum())  # an open window, whose gradients a load drops
    state = again.state(step=0)
    remainder = again.fabric.load(path, state)
    assert state["step"] == 3
    assert remainder == {"notes": {"keep": 1}}
    assert again.scheduler.last_epoch == 3
    assert largest_difference(again.run(3, 6), expected) == 0
    assert again.lr() == through.lr()
    assert inspect_checkpoint(path).has_optimizer

    fresh = Loop(FabricZeroStrategy(stage=stage))
    fresh.fabric.load(path, {"model": fresh.model})
    assert fresh.optimizer.state_dict() == {}
    assert fresh.lr() == 0.02, "without the optimizer in the state it starts afresh"
    fresh.fabric.load(path, fresh.state(step=0))
    assert largest_difference(fresh.run(3, 6), expected) == 0

    with pytest.raises(CheckpointError, match="holds no 'epoch'"):
        fresh.fabric.load(path, fresh.state(epoch=0))
    assert fresh.fabric.load(path, fresh.state(epoch=0), strict=False)["step"] == 3


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_between_trainer_and_fabric(stage: int, tmp_path: Path) -> None:
    """A Trainer's checkpoint goes on in Fabric, and Fabric's in a Trainer, weights and optimizer, as if in one run."""

    def fit(epochs: int, ckpt_path: Path | None = None) -> tuple[Regression, Any]:
        module = Regression("adamw", scheduler=False)
        runner = trainer(ZeroStrategy(stage=stage), epochs=epochs)
        runner.fit(module, in_order(), ckpt_path=ckpt_path)
        return module, runner

    module, runner = fit(1)
    runner.save_checkpoint(tmp_path / "trainer.ckpt")
    expected = whole_weights(fit(2)[0])

    loop = Loop(FabricZeroStrategy(stage=stage), Regression("adamw", scheduler=False))
    remainder = loop.fabric.load(tmp_path / "trainer.ckpt", {"model": loop.model, "optimizer": loop.optimizer})
    assert remainder["global_step"] == 6
    assert largest_difference(whole_weights(loop.network), whole_weights(module)) == 0
    assert largest_difference(loop_without_scheduler(loop), expected) < 1e-6

    loop = Loop(FabricZeroStrategy(stage=stage), Regression("adamw", scheduler=False))
    loop_without_scheduler(loop)
    loop.fabric.save(tmp_path / "fabric.ckpt", {"model": loop.model, "optimizer": loop.optimizer, "callbacks": "mine"})
    resumed, runner = fit(1, tmp_path / "fabric.ckpt")
    assert runner.global_step == 6
    assert largest_difference(whole_weights(resumed), expected) < 1e-6

    evaluated = Regression("adamw")
    trainer(ZeroStrategy(stage=stage)).test(evaluated, loader(), ckpt_path=tmp_path / "fabric.ckpt", verbose=False)
    assert largest_difference(whole_weights(evaluated), whole_weights(module)) < 1e-6


def in_order() -> DataLoader[Any]:
    """The batches that Fabric gives a rank; a Trainer's own sampler would shuffle them."""
    rows = loader().dataset
    sampler: DistributedSampler[Any] = DistributedSampler(rows, 2, int(os.environ["RANK"]), shuffle=False)
    return DataLoader(rows, batch_size=2, sampler=sampler)


def loop_without_scheduler(loop: Loop) -> dict[str, Tensor]:
    loop.scheduler.step = lambda: None  # type: ignore[method-assign]
    return loop.run(0, 6)


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_single_files_and_raw_weights(stage: int, tmp_path: Path) -> None:
    """Files of ddp's Fabric, raw state dicts and gathered folders load at any stage, into the fp32 weights too."""
    reference = Loop("ddp")
    expected = reference.run(0, 3)
    reference.fabric.save(tmp_path / "ddp.ckpt", reference.state(step=3))
    if reference.fabric.is_global_zero:
        torch.save(reference.network.state_dict(), tmp_path / "raw.pt")
    reference.fabric.barrier()

    def check(loop: Loop) -> None:
        assert largest_difference(whole_weights(loop.network), expected) == 0
        for group in loop.optimizer.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
        loop.run(0, 1)
        assert largest_difference(whole_weights(loop.network), expected) == 0, "stale fp32 weights came back"

    loop = Loop(FabricZeroStrategy(stage=stage))
    state = loop.state(step=0)
    told = pytest.warns(UserWarning, match="the optimizer starts afresh")
    with told if loop.fabric.is_global_zero else nullcontext():
        loop.fabric.load(tmp_path / "ddp.ckpt", state)
    assert state["step"] == 3
    assert loop.scheduler.last_epoch == 3
    check(loop)

    for path in (tmp_path / "raw.pt", tmp_path / "gathered"):
        loop = Loop(FabricZeroStrategy(stage=stage))
        loop.fabric.load_raw(path, loop.model)
        loop.fabric.strategy.save_gathered_weights(tmp_path / "gathered")
        check(loop)

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(2, 2)

    before = launched(FabricZeroStrategy(stage=stage))
    with before.init_module():
        other, fitting = Other(), body()
    before.load_raw(tmp_path / "raw.pt", fitting)
    assert largest_difference(whole_weights(fitting), expected) == 0, "weights come before the set-up, too"
    with pytest.raises(CheckpointError, match=r"0\.weight"):
        before.load_raw(tmp_path / "raw.pt", other)


@ranks(2)
def test_mistakes(tmp_path: Path) -> None:
    """What a state must hold is told on all ranks, before anything is written or changed."""
    path = tmp_path / "loop.ckpt"
    loop = Loop(FabricZeroStrategy(stage=2))
    before = whole_weights(loop.network)
    fabric, model, optimizer = loop.fabric, loop.model, loop.optimizer
    teacher = fabric.setup(body())
    network = body()
    second, second_optimizer = fabric.setup(network, optimizer_for("sgd", network))

    def refused(match: str, call: Any, *args: Any, error: type[Exception] = ConfigError, **more: Any) -> None:
        with pytest.raises(error, match=match):
            call(*args, **more)

    refused(r"fabric\.save: the state holds 'step': int, and no model", fabric.save, path, {"step": 1})
    refused(r"fabric\.load: the state holds nothing, and no model", fabric.load, path, {})
    refused("no model", fabric.load, path)
    refused(r"holds 2 models, 'a' and 'b'", fabric.save, path, {"a": model, "b": second})
    refused("holds 2 models", fabric.load, path, {"a": model, "b": second})
    refused("optimizer of Sequential", fabric.save, path, {"model": model, "optimizer": second_optimizer})
    refused("save_gathered_weights", fabric.save, path, {"model": teacher})
    refused("filter=.*cannot be applied", fabric.save, path, loop.state(), filter={"model": lambda *_: True})
    refused("storage_options", fabric.strategy.save_checkpoint, path, {}, storage_options={})
    refused("sharded", fabric.load_raw, path, optimizer, error=CheckpointError)
    refused("loop.ckpt", fabric.load, path, loop.state(), error=CheckpointError)
    refused("has not been set up", fabric.strategy.save_gathered_weights, path, module=body())
    refused(r"module=model", fabric.strategy.save_gathered_weights, path)
    assert list(tmp_path.iterdir()) == []
    assert largest_difference(whole_weights(loop.network), before) == 0

    fabric.save(path, {"model": model, "optimizer": optimizer})
    fabric.save(tmp_path / "second.ckpt", {"model": second, "optimizer": second_optimizer})
    refused("does not fit", fabric.load, path, {"model": fabric.setup(nn.Linear(2, 2))}, error=CheckpointError)


@ranks(2)
def test_two_models_in_their_own_folders(tmp_path: Path) -> None:
    """Each of two models has its own checkpoint and its own gathered folder."""
    loop = Loop(FabricZeroStrategy(stage=3))
    fabric = loop.fabric
    with fabric.init_module():
        other = nn.Linear(2, 3)
    second, second_optimizer = fabric.setup(other, optimizer_for("sgd", other))
    fabric.save(tmp_path / "first.ckpt", loop.state())
    fabric.save(tmp_path / "second.ckpt", {"model": second, "optimizer": second_optimizer})
    expected = whole_weights(loop.network), whole_weights(other)
    fabric.backward(loop.model(loop.batches[0][0]).sum(), model=loop.model)
    fabric.backward(second(torch.ones(1, 2)).sum(), model=second)
    loop.optimizer.step()
    second_optimizer.step()
    assert largest_difference(whole_weights(other), expected[1]) > 0
    fabric.load(tmp_path / "second.ckpt", {"model": second, "optimizer": second_optimizer})
    assert largest_difference(whole_weights(other), expected[1]) == 0
    assert largest_difference(whole_weights(loop.network), expected[0]) > 0
    fabric.load(tmp_path / "first.ckpt", loop.state())
    assert largest_difference(whole_weights(loop.network), expected[0]) == 0
    fabric.strategy.save_gathered_weights(tmp_path / "second", module=second)
    assert {tensor.name for tensor in inspect_checkpoint(tmp_path / "second").tensors} == {"weight", "bias"}
