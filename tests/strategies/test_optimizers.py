"""Optimizers under offload: swapped over the same groups, kept, or refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

from lightning_zero import ConfigError, ZeroStrategy
from lightning_zero.engine.optimizers import has_cpu_version
from tests.harness import ranks
from tests.models import Regression, largest_difference, loader, trainer, whole_weights


def fitted(strategy: Any, module: Regression, **flags: Any) -> Any:
    runner = trainer(strategy, **flags)
    runner.fit(module, loader())
    return runner


@pytest.mark.parametrize("preset", ["zero1_offload", "zero2_offload", "zero3_offload"])
@ranks(2)
def test_adamw_is_swapped_and_equals_ddp(preset: str) -> None:
    """O1: torch's AdamW becomes DeepSpeed's CPU Adam, with ddp's weights over a window of two and a scheduler."""
    expected, actual = Regression("adamw"), Regression("adamw")
    fitted("ddp", expected, accumulate_grad_batches=2, gradient_clip_val=0.1)
    runner = fitted(preset, actual, accumulate_grad_batches=2, gradient_clip_val=0.1)
    assert type(runner.model.basic_optimizer).__name__ == "DeepSpeedCPUAdam"
    assert largest_difference(whole_weights(actual), whole_weights(expected)) < 1e-5
    assert actual.lrs == pytest.approx(expected.lrs)


@ranks(2)
def test_sgd_is_kept_and_equals_ddp() -> None:
    """O1: an optimizer without a CPU version is kept, with the flag set to false."""
    expected, actual = Regression("sgd"), Regression("sgd")
    fitted("ddp", expected)
    runner = fitted("zero3_offload", actual)
    assert type(runner.model.basic_optimizer) is torch.optim.SGD
    assert runner.strategy.resolved.config["zero_force_ds_cpu_optimizer"] is False
    assert largest_difference(whole_weights(actual), whole_weights(expected)) < 1e-6


@ranks(2)
def test_flag_decides() -> None:
    """O1: the flag false keeps torch's AdamW on the CPU; true beside SGD is an error before training."""
    kept = fitted(ZeroStrategy(preset="zero2_offload", config={"zero_force_ds_cpu_optimizer": False}), Regression())
    assert type(kept.model.basic_optimizer) is torch.optim.AdamW
    module = Regression("sgd")
    with pytest.raises(ConfigError, match="zero_force_ds_cpu_optimizer"):
        fitted(ZeroStrategy(preset="zero2_offload", config={"zero_force_ds_cpu_optimizer": True}), module)
    assert module.losses == []


@ranks(2)
def test_deepspeed_cpu_adam_from_code_is_kept() -> None:
    """O1: a DeepSpeedCPUAdam that the user made himself is used as it is."""

    class Own(Regression):
        def configure_optimizers(self) -> Any:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            self.own = DeepSpeedCPUAdam(self.parameters(), lr=0.02, weight_decay=0.1)
            return self.own

    module, reference = Own(scheduler=False), Regression("adamw", scheduler=False)
    runner = fitted("zero2_offload", module)
    fitted("ddp", reference)
    assert runner.model.basic_optimizer is module.own
    assert largest_difference(whole_weights(module), whole_weights(reference)) < 1e-5


@ranks(2)
def test_schedulers_move_the_swapped_learning_rate(tmp_path: Any) -> None:
    """A11: step and plateau schedulers built on the swapped AdamW move the rate that the update reads."""

    class Plateau(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.5)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    for make in (Regression, Plateau):
        module = make()
        monitor = LearningRateMonitor()
        runner = trainer(
            "zero3_offload", epochs=3, logger=CSVLogger(tmp_path), callbacks=[monitor], log_every_n_steps=1
        )
        runner.fit(module, loader(), loader())
        engine_rate = runner.model.basic_optimizer.param_groups[0]["lr"]
        assert engine_rate == runner.lr_scheduler_configs[0].scheduler.optimizer.param_groups[0]["lr"]
        assert module.lrs[-1] < module.lrs[0]
        assert list(monitor.lrs) == ["lr-AdamW"]
        assert monitor.lrs["lr-AdamW"][0] == module.lrs[0]


@ranks(1)
def test_groups_keep_their_own_rates() -> None:
    """The swap keeps two groups' learning rates and weight decays, in the same dictionaries."""

    class Groups(Regression):
        def configure_optimizers(self) -> Any:
            first, second = self.net[0], self.net[2]
            self.mine = torch.optim.AdamW(
                [{"params": first.parameters(), "lr": 0.1}, {"params": second.parameters(), "weight_decay": 0.0}]
            )
            return self.mine

    module = Groups()
    runner = trainer("zero2_offload", devices=1)
    runner.fit(module, loader(ranks=1))
    swapped = runner.model.basic_optimizer
    assert all(new is old for new, old in zip(swapped.param_groups, module.mine.param_groups, strict=True))
    assert [group["lr"] for group in swapped.param_groups] == [0.1, 1e-3]
    assert [group["weight_decay"] for group in swapped.param_groups] == [0.01, 0.0]


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (lambda p: torch.optim.AdamW(p), True),
        (lambda p: torch.optim.Adam(p), True),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), False),
        (lambda p: torch.optim.AdamW(p, maximize=True), False),
        (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)), False),
        (lambda p: torch.optim.NAdam(p), False),
        (lambda p: torch.optim.SGD(p), False),
    ],
)
def test_which_optimizers_have_a_cpu_version(optimizer: Any, expected: bool) -> None:
    """Only an Adam or AdamW whose options DeepSpeed's CPU Adam computes is swapped."""
    assert has_cpu_version(optimizer([torch.nn.Parameter(torch.zeros(2))])) is expected


class Returns(Regression):
    """Returns what a test gives it from ``configure_optimizers``."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


@ranks(1)
def test_unsupported_optimizers_are_refused() -> None:
    """O6: two optimizers and LBFGS get one clear error each, before the first step."""

    def two(parameters: Any) -> Any:
        first, *rest = list(parameters)
        return [torch.optim.SGD([first], lr=0.1), torch.optim.SGD(rest, lr=0.1)]

    for make, automatic, message in (
        (two, True, "returned several optimizers.*one optimizer with several parameter groups"),
        (two, False, "returned 2 optimizers.*one optimizer with several parameter groups"),
        (torch.optim.LBFGS, True, "LBFGS does not work under ZeRO"),
    ):
        module = Returns(make)
        module.automatic_optimization = automatic
        with pytest.raises(ConfigError, match=message):
            trainer(ZeroStrategy(), devices=1).fit(module, loader(ranks=1))
        assert module.losses == []


@ranks(1, 2)
def test_training_step_that_returns_none_is_refused(world_size: int) -> None:
    """O6: a training step without a loss gets an error that shows what to return instead."""

    class Nothing(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    with pytest.raises(ConfigError, match=r"returned None.*\.sum\(\)"):
        trainer(ZeroStrategy(), devices=world_size).fit(Nothing(), loader(ranks=world_size))


@ranks(1)
def test_without_a_compiler_offload_uses_torch_adamw(tmp_path: Any) -> None:
    """O5: without a compiler the offloaded optimizer is torch's AdamW, and that is said before the model is built."""
    import os

    said: list[str] = []

    class Collects(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(f"{len(built)} {record.getMessage()}")

    built: list[int] = []

    class Building(Regression):
        def configure_model(self) -> None:
            built.append(1)
            super().configure_model()

    handler = Collects()
    logging.getLogger("lightning_zero.engine.ops").addHandler(handler)
    before = dict(os.environ)
    os.environ.update(PATH=str(tmp_path), TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"), CXX="")
    try:
        runner = trainer("zero2_offload", devices=1)
        runner.fit(Building("adamw"), loader(ranks=1))
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert type(runner.model.basic_optimizer) is torch.optim.AdamW
    assert any(line.startswith("0 ") and "cpu_adam" in line and "compiler" in line for line in said)
