"""A run goes on with another number of processes, at another stage, with its optimizer's states."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_zero import CheckpointError, ZeroStrategy
from tests.harness import ranks, run_ranks
from tests.models import WIDTH, Regression, Rows, largest_difference, trainer, whole_weights

BATCHES = 3
SAVED = {"zero1": {}, "zero2": {}, "zero3": {}, "zero3_offload": {}, "bf16": {"precision": "bf16-mixed"}}


class Same:
    """The same batches for every rank, so that the mean gradient does not depend on how many there are."""

    batch_size = 2

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        rows = Rows(BATCHES * self.batch_size)
        for start in range(0, len(rows), self.batch_size):
            yield rows.inputs[start : start + self.batch_size], rows.targets[start : start + self.batch_size]


class Groups(Regression):
    """Two parameter groups, a frozen layer in the middle, and a layer with two names."""

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(11)
            layers = [nn.Linear(WIDTH, 13), nn.Linear(13, 13), nn.Linear(13, 13), nn.Linear(13, 3)]
            layers[1].requires_grad_(False)
            self.net = nn.Sequential(layers[0], layers[1], nn.Tanh(), layers[2], nn.Tanh(), layers[2], layers[3])

    def configure_optimizers(self) -> Any:
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        decayed = {"params": [p for name, p in named if "weight" in name], "weight_decay": 0.1}
        others = {"params": [p for name, p in named if "weight" not in name], "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([decayed, others], lr=0.02)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def masters(module: L.LightningModule) -> dict[str, Tensor]:
    """The fp32 weights, as DeepSpeed's own function gives them."""
    from deepspeed.utils import safe_get_full_fp32_param

    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return {name: safe_get_full_fp32_param(p).detach().flatten().clone() for name, p in trained}


def moments(module: L.LightningModule) -> dict[str, Tensor]:
    """Adam's moments at stage 3, as DeepSpeed's own function gives them; below, it knows the first group's alone."""
    from deepspeed.utils import safe_get_full_optimizer_state

    return {
        f"{name}/{key}": safe_get_full_optimizer_state(p, key).detach().flatten().clone()
        for name, p in module.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
        if p.requires_grad and hasattr(p, "ds_id")
    }


def plainly_trained(epochs: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and moments after training with torch alone."""
    module = Groups()
    module.configure_model()
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for batch in itertools.chain(*[Same()] * epochs):
        optimizer.zero_grad()
        module.loss(batch).backward()
        optimizer.step()
        scheduler.step()
    of = {
        f"{name}/{key}": optimizer.state[p][key].flatten()
        for name, p in module.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
        if p.requires_grad
    }
    return {name: p.detach() for name, p in module.named_parameters()}, of


class Look(Callback):
    """What a resumed run begins with."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.masters, self.moments = masters(module), moments(module)
        self.groups = [(group["lr"], group["weight_decay"]) for group in trainer.optimizers[0].param_groups]
        self.epoch, self.step = trainer.current_epoch, trainer.global_step

    def __reduce__(self) -> Any:
        return Look, (), {name: vars(self)[name] for name in ("masters", "moments", "groups", "epoch", "step")}


def fit(strategy: Any, devices: int, epochs: int, *callbacks: Callback, **flags: Any) -> tuple[Groups, L.Trainer]:
    module = Groups()
    ckpt_path = flags.pop("ckpt_path", None)
    runner = trainer(strategy, epochs=epochs, devices=devices, callbacks=list(callbacks), **flags)
    runner.fit(module, Same(), ckpt_path=ckpt_path)
    return module, runner


def save(folder: Path, kinds: list[str]) -> dict[str, dict[str, Tensor]]:
    """Saves after an epoch of each kind; the fp32 weights then."""
    found = {}
    for kind in kinds:
        module, runner = fit("zero2" if kind == "bf16" else kind, 2, 1, **SAVED[kind])
        runner.save_checkpoint(folder / f"{kind}.ckpt")
        found[kind] = masters(module)
    return found


def resume(folder: Path, kinds: list[tuple[str, str]]) -> list[tuple[Look, dict[str, Tensor]]]:
    """Resumes each kind under each strategy, to the end of the second epoch."""
    found = []
    for kind, preset in kinds:
        look = Look()
        devices = int(os.environ["WORLD_SIZE"])
        module, _ = fit(preset, devices, 2, look, ckpt_path=folder / f"{kind}.ckpt", **SAVED[kind])
        found.append((look, whole_weights(module)))
    return found


def test_another_number_of_ranks_at_another_stage(tmp_path: Path) -> None:
    """C5: weights, moments, learning rates and counters are those that were saved, and the run ends as one unbroken."""
    saved = run_ranks(save, 2, tmp_path, list(SAVED), timeout=300)[0]
    _, moments_then = plainly_trained(1)
    weights_later, _ = plainly_trained(2)
    lr = 0.02 * 0.9**BATCHES
    stages = ["zero1", "zero2", "zero3"]
    everything = list(itertools.product(stages, stages))
    cases = {
        1: [*everything, ("zero3_offload", "zero2")],
        2: [pair for pair in everything if pair[0] != pair[1]],
        3: [("zero1", "zero3"), ("zero2", "zero2"), ("zero3", "zero1"), ("bf16", "zero3"), ("zero2", "zero3_offload")],
        4: [("zero1", "zero1"), ("zero3", "zero3"), ("zero3_offload", "zero2_offload")],
    }
    for count, kinds in cases.items():
        resumed = run_ranks(resume, count, tmp_path, kinds, timeout=300)[0]
        for (kind, preset), (look, weights) in zip(kinds, resumed, strict=True):
            case = f"{kind} on 2 ranks to {preset} on {count}"
            near = 1e-2 if kind == "bf16" else 1e-6
            assert largest_difference(look.masters, saved[kind]) == 0.0, case
            assert bool(look.moments) == preset.startswith("zero3")
            for name, moment in look.moments.items():
                torch.testing.assert_close(moment, moments_then[name], atol=near, rtol=near, msg=f"{case}: {name}")
            assert look.groups == [(pytest.approx(lr), 0.1), (pytest.approx(lr), 0.0)], case
            assert (look.epoch, look.step) == (1, BATCHES), case
            assert largest_difference(weights, weights_later) < near, case


def load_in_fabric(folder: Path) -> dict[str, Tensor]:
    """Another epoch in a Fabric's loop, from a Trainer's checkpoint."""
    fabric = L.Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="zero3")
    fabric.launch()
    with fabric.init_module():
        module = Groups()
        module.configure_model()
    configured = module.configure_optimizers()
    model, optimizer = fabric.setup(module, configured["optimizer"])
    scheduler = configured["lr_scheduler"]["scheduler"]
    fabric.load(folder / "zero2.ckpt", {"model": model, "optimizer": optimizer})
    for rows, targets in Same():
        fabric.backward(nn.functional.mse_loss(model(rows), targets))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return whole_weights(module)


def test_a_trainers_checkpoint_in_fabric_on_more_ranks(tmp_path: Path) -> None:
    """C5: a Fabric on three ranks at stage 3 goes on from what a Trainer saved on two at stage 2."""
    run_ranks(save, 2, tmp_path, ["zero2"])
    expected, _ = plainly_trained(2)
    assert largest_difference(run_ranks(load_in_fabric, 3, tmp_path)[0], expected) < 1e-6


@ranks(2)
def test_what_cannot_be_resharded(tmp_path: Path) -> None:
    """Another optimizer, other groups, stage 0 and `elastic=False` are refused before anything is changed."""
    path = tmp_path / "run.ckpt"
    _, runner = fit("zero2", 2, 1)
    runner.save_checkpoint(path)

    class Sgd(Groups):
        def configure_optimizers(self) -> Any:
            decayed, others = [], []
            for name, p in self.named_parameters():
                (decayed if "weight" in name else others).append(p)
            return torch.optim.SGD([{"params": decayed}, {"params": others}], lr=0.1, momentum=0.9)

    class OneGroup(Groups):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    for module, strategy, message in (
        (Sgd(), ZeroStrategy(stage=3), r"optimizer without momentum, and this run's SGD has"),
        (OneGroup(), ZeroStrategy(stage=3), r"2 parameter groups, and this run's optimizer has 1"),
        (Groups(), ZeroStrategy(stage=0), r"cannot be set part by part"),
        (Groups(), ZeroStrategy(stage=3, elastic=False), r"stage 2 by 2 ranks.*elastic=True"),
    ):
        with pytest.raises(CheckpointError, match=message):
            trainer(strategy, epochs=2).fit(module, Same(), ckpt_path=path)
        assert module.losses == []
    plain = tmp_path / "plain.ckpt"
    _, runner = fit(ZeroStrategy(stage=0), 2, 1)
    runner.save_checkpoint(plain)
    with pytest.raises(CheckpointError, match="was saved at stage 0"):
        fit("zero2", 2, 2, ckpt_path=plain)
