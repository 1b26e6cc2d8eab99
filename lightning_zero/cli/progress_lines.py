"""How far a run is, where there is no terminal for a progress bar."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from typing_extensions import override

from lightning_zero.cli.output import console


class ProgressLines(Callback):
    """Prints a line whenever the loggers are written, and one after each validation, instead of Lightning's bars.

    Silent where the Trainer has no progress bar, or one of the user's own.
    """

    def __init__(self) -> None:
        self._prints = False
        self._last = (0, 0.0)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        bar = trainer.progress_bar_callback
        if isinstance(bar, (RichProgressBar, TQDMProgressBar)):
            bar.disable()
            self._prints = trainer.is_global_zero

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last = (trainer.global_step, time.monotonic())

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        every: int = trainer.log_every_n_steps or 1  # type: ignore[attr-defined]  # the Trainer sets it when it starts
        step = trainer.global_step
        before, then = self._last
        if not self._prints or step == before or step % every:
            return
        now = time.monotonic()
        self._last = (step, now)
        rate = (step - before) / max(now - then, 1e-9)
        self._print(trainer, f"epoch {trainer.current_epoch}, step {step}, {rate:.2f} steps/s")

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._prints and not trainer.sanity_checking and trainer.training:
            self._print(trainer, f"epoch {trainer.current_epoch}, step {trainer.global_step}, validated")

    def _print(self, trainer: pl.Trainer, what: str) -> None:
        values = {name: value for name, value in trainer.progress_bar_metrics.items() if name != "v_num"}
        told = "".join(f", {name} {_number(value)}" for name, value in values.items())
        console().print(what + told)


def _number(value: Any) -> str:
    return f"{float(value):.4g}" if isinstance(value, (int, float, torch.Tensor)) else str(value)
