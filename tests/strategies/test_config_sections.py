"""Optimizer and scheduler sections of the config, alone and mixed with code."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

from lightning_zero import ConfigError, ZeroStrategy
from tests.harness import ranks
from tests.models import body, loader, trainer
from tests.strategies.configured import Configured

ADAMW = {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}}  # torch's: nothing to compile
LINEAR = {"warmup_min_lr": 0, "warmup_max_lr": 0.02, "warmup_num_steps": 4, "warmup_type": "linear"}
WARMUP = {"type": "WarmupLR", "params": LINEAR}
UPDATES = 7


def fit(module: Configured, config: Any, **flags: Any) -> L.Trainer:
    runner = trainer(ZeroStrategy(stage=1, config=config), **flags)
    runner.fit(module, loader(UPDATES * flags.get("accumulate_grad_batches", 1)))
    return runner


def lrs_of_deepspeed(scheduler: dict[str, Any], accumulate: int) -> list[float]:
    """The learning rate that each update of a loop written against DeepSpeed alone uses."""
    import deepspeed

    network = body()
    engine, optimizer, *_ = deepspeed.initialize(
        model=network,
        model_parameters=list(network.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulate,
            "optimizer": ADAMW,
            "scheduler": scheduler,
            "zero_optimization": {"stage": 1},
        },
    )
    lrs = []
    for rows, targets in loader(UPDATES * accumulate, ranks=1):
        if engine.is_gradient_accumulation_boundary():
            lrs.append(optimizer.param_groups[0]["lr"])
        engine.backward(torch.nn.functional.mse_loss(engine(rows), targets))
        engine.step()
    engine.destroy()
    return lrs


@ranks(2)
def test_schedulers_step_once_per_update() -> None:
    """O2, O3: with the scheduler of the config, updates 0 to 6 use the LR of a raw DeepSpeed loop."""
    by_hand = [0, 0, 0.005, 0.01, 0.015, 0.02, 0.02]  # the first step of DeepSpeed's scheduler leads to its step 0
    decay = {"type": "WarmupDecayLR", "params": {**LINEAR, "total_num_steps": UPDATES}}
    log = {"type": "WarmupLR", "params": {**LINEAR, "warmup_type": "log"}}
    cosine = {"type": "WarmupCosineLR", "params": {"total_num_steps": UPDATES, "warmup_num_steps": 2}}
    for scheduler, accumulate in ((WARMUP, 1), (WARMUP, 3), (log, 1), (decay, 1), (cosine, 3)):
        expected = lrs_of_deepspeed(scheduler, accumulate)
        case = f"{scheduler['type']}, N={accumulate}"
        module = Configured()
        fit(module, {"optimizer": ADAMW, "scheduler": scheduler}, epochs=1, accumulate_grad_batches=accumulate)
        assert module.lrs == pytest.approx(expected), case
        if scheduler is WARMUP:
            assert expected == pytest.approx(by_hand), case
            module = Configured("optimizer")
            fit(module, {"scheduler": scheduler}, epochs=1, accumulate_grad_batches=accumulate)
            assert module.lrs == pytest.approx(expected), case


@ranks(2)
def test_warmup_lengths() -> None:
    """O4: warm-up of 0 or 1 updates, as long as the run, or a share of it, has the length that was meant."""
    written = {}
    for name, length, hyper_parameters in (
        ("0", 0, {}),
        ("1", 1, {}),
        ("all", UPDATES, {}),
        ("share", "auto", {"warmup_ratio": 0.5}),
        ("float in warmup_steps", "auto", {"warmup_steps": 0.3}),
        ("none", "auto", {}),
    ):
        params = {**LINEAR, "warmup_num_steps": length, "warmup_max_lr": "auto", "total_num_steps": "auto"}
        module = Configured(**hyper_parameters)
        config = {"optimizer": ADAMW, "scheduler": {"type": "WarmupDecayLR", "params": params}}
        runner = fit(module, config, epochs=1)
        assert len(module.lrs) == UPDATES, name
        assert max(module.lrs) <= 0.02, name
        params = runner.strategy.resolved.config["scheduler"]["params"]
        assert (params["total_num_steps"], params["warmup_max_lr"]) == (UPDATES, 0.02), name
        written[name] = params["warmup_num_steps"]
    assert written == {"0": 1, "1": 1, "all": 7, "share": 4, "float in warmup_steps": 3, "none": 1}


@ranks(2)
def test_one_place_for_each() -> None:
    """O3: an optimizer or a scheduler in both places, or in neither, is an error that names them."""
    for module, config, message in (
        (Configured("optimizer"), {"optimizer": ADAMW}, r"`optimizer` section and Configured\.configure_optimizers"),
        (Configured("both"), {"optimizer": ADAMW}, r"describe the scheduler in the config"),
        (Configured("both"), {"scheduler": WARMUP}, r"scheduler: config has a section for \"WarmupLR\""),
        (Configured("nothing"), {}, r"configure_optimizers returned None.*no `optimizer` section"),
        (Configured("nothing"), {"scheduler": WARMUP}, r"configure_optimizers returned None.*no `optimizer` section"),
    ):
        with pytest.raises(ConfigError, match=message):
            fit(module, config, epochs=1)


@ranks(1)
def test_the_monitor_sees_the_scheduler_of_the_config() -> None:
    """Lightning's LearningRateMonitor logs the learning rate of a scheduler that the config describes."""
    module = Configured()
    monitor = LearningRateMonitor("step")
    flags = {"logger": CSVLogger("logs"), "callbacks": [monitor], "log_every_n_steps": 1, "devices": 1}
    runner = trainer(ZeroStrategy(config={"optimizer": ADAMW, "scheduler": WARMUP}), epochs=1, **flags)
    runner.fit(module, loader(UPDATES, ranks=1))
    assert monitor.lrs == {"lr-AdamW": pytest.approx(module.lrs)}
