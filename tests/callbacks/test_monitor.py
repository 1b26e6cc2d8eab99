"""`ZeroMonitor`: what it logs is what a ddp run's gradients and the clock say."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero import ConfigError, ZeroMonitor, ZeroStrategy
from tests.harness import ranks
from tests.models import Regression, body, loader, trainer

STEPS = 3
NORM = "zero/grad_norm_before_clipping"


class Kept(Logger):
    """Keeps what it is given."""

    name = "kept"
    version = 0

    def __init__(self) -> None:
        self.entries: list[dict[str, float]] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is kept of them."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.entries.append(metrics)


class Deep(Regression):
    """A network of which layers stand inside and outside of a list, and one is frozen."""

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(2)
            inner = torch.nn.Module()
            inner.blocks = torch.nn.ModuleList([torch.nn.Linear(7, 7), body(), torch.nn.Linear(3, 3)])
            inner.head = torch.nn.Linear(3, 3)
            inner.blocks[2].requires_grad_(False)
            self.net = inner

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.net.blocks:
            rows = block(rows)
        result: Tensor = self.net.head(rows)
        return result


class DdpNorms(Callback):
    """Computes, from ddp's whole gradients, the norm of all of them and of each layer."""

    LAYERS = ("net.blocks.0", "net.blocks.1", "net.head")

    def __init__(self) -> None:
        self.norms: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        named = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        norms = {NORM: torch.cat([g.flatten() for g in named.values()]).norm().item()}
        for layer in self.LAYERS:
            flat = torch.cat([g.flatten() for name, g in named.items() if name.startswith(f"{layer}.")])
            norms[f"zero/grad_norm/{layer}"] = flat.norm().item()
        self.norms.append(norms)


def logged(strategy: Any, callback: Callback, accumulate: int, **flags: Any) -> list[dict[str, float]]:
    """What a run of `STEPS` updates with strong clipping logs."""
    kept = Kept()
    defaults = {"gradient_clip_val": 0.05, "max_steps": STEPS, "log_every_n_steps": 1}
    runner = trainer(
        strategy, logger=kept, callbacks=[callback], accumulate_grad_batches=accumulate, **{**defaults, **flags}
    )
    runner.fit(Deep("sgd"), loader(batches=STEPS * accumulate))
    return [entry for entry in kept.entries if any(name.startswith("zero/") for name in entry)]


@pytest.mark.parametrize("accumulate", [1, 4])
@ranks(2, timeout=240)
def test_norms_are_those_of_ddp(accumulate: int) -> None:
    """A4: the norms before clipping, of all gradients and of each layer, equal those of ddp to 1e-5 at every stage."""
    expected = DdpNorms()
    logged("ddp", expected, accumulate)
    assert len(expected.norms) == STEPS
    assert all(norms[NORM] > 0.2 for norms in expected.norms), "clipping at 0.05 must change them to be a test"
    runs: dict[str, Any] = {f"stage {stage}": {"stage": stage} for stage in (0, 1, 2, 3)}
    runs |= {f"stage {stage}, offload": {"stage": stage, "offload_optimizer": "cpu"} for stage in (1, 2, 3)}
    for name, arguments in runs.items():
        entries = logged(ZeroStrategy(**arguments), ZeroMonitor(layer_norms=True), accumulate)
        assert len(entries) == STEPS, name
        for entry, norms in zip(entries, expected.norms, strict=True):
            found = {key: value for key, value in entry.items() if "norm" in key}
            assert found == pytest.approx(norms, rel=1e-5), name


class Slow(Deep):
    """Takes a known time for a step and for a validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(1)


class Text(Deep):
    """Trains on a matrix of whole numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch.float()).square().mean()


@ranks(2)
def test_throughput_memory_and_any_logger(tmp_path: Path) -> None:
    """Samples and tokens are counted over all ranks without validation, in two loggers, on the steps that log."""
    kept, csv = Kept(), CSVLogger(tmp_path)
    flags = {"max_steps": 8, "log_every_n_steps": 4, "val_check_interval": 2, "limit_val_batches": 1}
    runner = trainer(ZeroStrategy(stage=2), logger=[kept, csv], callbacks=[ZeroMonitor(tokens_per_sample=10)], **flags)
    runner.fit(Slow("sgd"), loader(batches=8, batch_size=2), loader(batches=1))
    entries = [entry for entry in kept.entries if NORM in entry]
    assert len(entries) == 2
    for entry in entries:
        rate = entry["zero/samples_per_second"]
        assert 2 < rate <= 2 * 2 / 0.05  # two samples on two ranks; with the validations' seconds at most 7
        assert rate > 8, "validation does not count"
        assert entry["zero/tokens_per_second"] == pytest.approx(10 * rate, rel=1e-4)
        assert 0.05 < entry["zero/process_memory_gb"] < entry["zero/host_memory_gb"] * 20
        assert entry["zero/skipped_updates"] == 0
        assert "zero/device_memory_gb" not in entry  # a CPU has none of its own
        assert "zero/loss_scale" not in entry
    if runner.is_global_zero:
        header = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()[0].split(",")
        assert {NORM, "zero/tokens_per_second"} <= set(header)

    text = Kept()
    runner = trainer(ZeroStrategy(stage=1), logger=text, callbacks=[ZeroMonitor()], max_steps=1, log_every_n_steps=1)
    runner.fit(Text("sgd"), DataLoader(torch.arange(28).view(4, 7), batch_size=2))
    (entry,) = [entry for entry in text.entries if NORM in entry]
    assert entry["zero/tokens_per_second"] == pytest.approx(7 * entry["zero/samples_per_second"], rel=1e-4)


class Collectives(Callback):
    """Counts the messages of torch.distributed's own functions, update by update."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.now = 0
        for name in ("all_reduce", "all_gather"):
            setattr(dist, name, self._counted(getattr(dist, name)))

    def _counted(self, original: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.now += 1
            return original(*args, **kwargs)

        return counted

    def on_train_batch_start(self, *args: Any) -> None:
        self.now = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.counts.append(self.now)


@ranks(2)
def test_no_message_in_updates_that_do_not_log() -> None:
    """The monitor sends one message in an update that logs, one more for the layers, and none in any other."""
    plain = Collectives()
    logged(ZeroStrategy(stage=2), plain, 1, log_every_n_steps=3)
    for layer_norms, messages in ((False, 1), (True, 2)):
        watched = Collectives()
        callbacks = [ZeroMonitor(layer_norms=layer_norms), watched]
        runner = trainer(
            ZeroStrategy(stage=2),
            logger=Kept(),
            callbacks=callbacks,
            gradient_clip_val=0.05,
            max_steps=STEPS,
            log_every_n_steps=3,
        )
        runner.fit(Deep("sgd"), loader(batches=STEPS))
        extra = [ours - theirs for ours, theirs in zip(watched.counts, plain.counts, strict=True)]
        assert extra == [0, 0, messages]


class Infinite(Deep):
    """Its second batch has an infinite loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (float("inf") if batch_idx == 1 else 1.0)


@ranks(1)
def test_skipped_updates_are_counted() -> None:
    """An update that was skipped counts as such, and its norms are nan."""
    kept = Kept()
    strategy = ZeroStrategy(stage=2, config={"bf16": {"enabled": "auto", "check_grad_overflow": True}})
    runner = trainer(
        strategy,
        devices=1,
        logger=kept,
        callbacks=[ZeroMonitor(layer_norms=True)],
        precision="bf16-mixed",
        max_epochs=1,
        log_every_n_steps=1,
    )
    runner.fit(Infinite("sgd"), loader(batches=3, ranks=1))
    entries = [entry for entry in kept.entries if "zero/skipped_updates" in entry]
    assert [entry["zero/skipped_updates"] for entry in entries] == [0, 1, 1]
    for name in (NORM, "zero/grad_norm/net.head"):
        assert [math.isfinite(entry[name]) for entry in entries] == [True, False, True]


@ranks(1)
def test_refusals() -> None:
    """Another strategy, and layers where they cannot be told, are refused; no logger is warned of."""
    with pytest.raises(ConfigError, match=r"ZeroMonitor reads ZeRO engines, and this run has SingleDeviceStrategy"):
        trainer("auto", devices=1, callbacks=[ZeroMonitor()]).fit(Deep("sgd"), loader(ranks=1))
    manual = Deep("sgd")
    manual.automatic_optimization = False
    with pytest.raises(ConfigError, match=r"layer_norms=True\) needs automatic optimization"):
        trainer("zero2", devices=1, callbacks=[ZeroMonitor(layer_norms=True)]).fit(manual, loader(ranks=1))
    dealt = ZeroStrategy(stage=2, config={"zero_optimization": {"round_robin_gradients": True}})
    with pytest.raises(ConfigError, match=r"round_robin_gradients: .* ZeroMonitor\(layer_norms=False\)"):
        trainer(dealt, devices=1, callbacks=[ZeroMonitor(layer_norms=True)]).fit(Deep("sgd"), loader(ranks=1))
    runner: L.Trainer = trainer("zero2", devices=1, callbacks=[ZeroMonitor()], max_steps=1)
    with pytest.warns(UserWarning, match="ZeroMonitor logs through the Trainer's loggers, and there is none"):
        runner.fit(Deep("sgd"), loader(ranks=1))
