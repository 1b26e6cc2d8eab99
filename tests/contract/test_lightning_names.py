"""Lightning's private names, held to what `_compat/lightning.py` takes them for."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from lightning_zero._compat import lightning as compat

ROWS = torch.arange(24 * 32, dtype=torch.float).reshape(24, 32) / 768


class At(Callback):
    """Calls a function at one hook and keeps the results."""

    def __init__(self, hook: str, ask: Callable[[L.Trainer], Any]) -> None:
        self.answers: list[Any] = []

        def answer(trainer: L.Trainer, *_: Any, **__: Any) -> None:
            self.answers.append(ask(trainer))

        setattr(self, hook, answer)


def fitted(model: L.LightningModule, *callbacks: Callback, loaders: Any = None, batches: int = 3) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=batches,
        limit_val_batches=0,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loaders)
    return trainer


def rows(shuffle: bool = False) -> DataLoader[Any]:
    data: Any = ROWS
    return DataLoader(data, batch_size=4, shuffle=shuffle)


@pytest.mark.parametrize("model", [BoringModel, ManualOptimBoringModel])
def test_discounted_update(model: type[L.LightningModule]) -> None:
    """`optim_progress.optimizer.step` and `optim_step_progress` are what `global_step` counts."""
    trainer = fitted(model())
    assert trainer.global_step == 3
    compat.discount_update(trainer)
    assert trainer.global_step == 2


@pytest.mark.parametrize(
    ("loaders", "count"),
    [
        (rows, 1),
        (lambda: [rows(), rows()], 2),
        (lambda: {"a": rows(), "b": rows()}, 2),
        (lambda: None, 0),
    ],
    ids=["one", "list", "dict", "hook"],
)
def test_loaders_passed_to_fit(loaders: Callable[[], Any], count: int) -> None:
    """`fit_loop._data_source` holds what was given to `fit`, or says that a hook makes the loaders."""

    class TakesAnything(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            while not isinstance(batch, torch.Tensor):
                batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
            return super().training_step(batch, batch_idx)

    asked = At("setup", lambda trainer: compat.loaders_passed_to_fit(trainer))
    fitted(TakesAnything(), asked, loaders=loaders())
    [found] = asked.answers
    assert len(found) == count
    assert all(isinstance(loader, DataLoader) for loader in found)


def test_loaders_from_hook() -> None:
    """`fit_loop.setup_data` makes the hook's loaders once, and `_combined_loader` holds them."""
    made = []

    class Counts(BoringModel):
        def train_dataloader(self) -> DataLoader[Any]:
            made.append(rows())
            return made[-1]

    asked = At("on_fit_start", lambda trainer: compat.loaders_from_hook(trainer))
    fitted(Counts(), asked)
    assert asked.answers == [made]
    assert len(made) == 1


def test_loaders_given_to_fit_are_not_made() -> None:
    """`loaders_from_hook` leaves loaders that were given to `fit` alone."""
    asked = At("on_fit_start", lambda trainer: (compat.loaders_from_hook(trainer), trainer.fit_loop._combined_loader))
    fitted(BoringModel(), asked, loaders=rows())
    assert asked.answers == [([], None)]


def test_loaders_are_made_again() -> None:
    """`fit_loop` makes its loaders when `_combined_loader` is None, and has the state of a resumed loader by name."""
    made = []

    class Counts(BoringModel):
        def train_dataloader(self) -> DataLoader[Any]:
            made.append(rows())
            return made[-1]

    def resume(trainer: L.Trainer) -> None:
        loop = trainer.fit_loop
        assert loop._combined_loader_states_to_load == []
        loop.setup_data()
        _Loop.restarting.fset(loop, True)  # type: ignore[attr-defined]  # the fit loop's own asks the progress
        loop._combined_loader_states_to_load = [{}]
        compat.remake_loaders(trainer, made_early=False)
        assert loop._combined_loader is None
        loop._combined_loader_states_to_load = []
        loop.restarting = False

    asked = At("on_train_start", resume)
    fitted(Counts(), asked)
    assert len(asked.answers) == 1
    assert len(made) == 2


def test_when_the_loader_and_its_iterator_exist() -> None:
    """`_data_fetcher` comes with the first batch, and `batch_progress.is_last_batch` with the last."""
    before = At("setup", compat.loaders_are_to_be_made)
    after = At("on_train_batch_start", compat.loaders_are_to_be_made)
    ended = At("on_train_batch_end", compat.epoch_has_ended)
    fitted(BoringModel(), before, after, ended)
    assert before.answers == [True]
    assert after.answers == [False] * 3
    assert ended.answers == [False, False, True]


def test_a_new_iterator_draws_as_the_loader_does() -> None:
    """Iterating over `_data_fetcher` takes the random numbers that a shuffling loader's own iterator takes."""

    def draw(trainer: L.Trainer) -> torch.Tensor:
        torch.manual_seed(7)
        compat.draw_as_a_new_iterator(trainer)
        return torch.rand(3)

    asked = At("on_train_batch_start", draw)
    fitted(BoringModel(), asked, loaders=rows(shuffle=True), batches=1)
    torch.manual_seed(7)
    untouched = torch.rand(3)
    torch.manual_seed(7)
    iter(rows(shuffle=True))
    expected = torch.rand(3)
    assert torch.equal(asked.answers[0], expected)
    assert not torch.equal(expected, untouched)


def test_optimizers_are_built_and_released() -> None:
    """`_init_optimizers_and_lr_schedulers` reads `configure_optimizers`; `_reset_optimizers_and_schedulers` forgets."""
    asked = At("on_fit_start", lambda trainer: compat.build_optimizers(trainer.lightning_module))
    trainer = fitted(BoringModel(), asked)
    [(optimizers, schedulers)] = asked.answers
    assert [type(optimizer) for optimizer in optimizers] == [torch.optim.SGD]
    assert [(type(config.scheduler), config.interval) for config in schedulers] == [
        (torch.optim.lr_scheduler.StepLR, "epoch")
    ]
    assert trainer.strategy.optimizers
    compat.release_optimizers(trainer.strategy)
    assert trainer.strategy.optimizers == []
    assert trainer.strategy.lr_scheduler_configs == []


def test_module_hook_is_called() -> None:
    """`_call_lightning_module_hook` calls the hook by name on the module and returns its value."""
    module = BoringModel()
    asked = At(
        "on_fit_start", lambda trainer: compat.call_module_hook(trainer, "configure_optimizers", pl_module=module)
    )
    fitted(module, asked)
    assert isinstance(asked.answers[0][0][0], torch.optim.SGD)


def test_overridden_backward_is_seen() -> None:
    """`is_overridden` tells a module's own hook from the inherited one."""

    class Own(BoringModel):
        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            loss.backward()

    assert compat.is_overridden("backward", Own())
    assert not compat.is_overridden("backward", BoringModel())


def test_device_indices_are_checked() -> None:
    """`_validate_device_index_selection` refuses devices that do not count from zero, as DeepSpeed needs them."""
    compat.validate_device_indices([torch.device("cuda", 0), torch.device("cuda", 1)])
    with pytest.raises(RuntimeError, match="device indices"):
        compat.validate_device_indices([torch.device("cuda", 1)])


def test_default_timeout_and_interactivity_are_values() -> None:
    """`default_pg_timeout` is a duration, and `_IS_INTERACTIVE` false in a script."""
    assert isinstance(compat.default_timeout, datetime.timedelta)
    assert compat.IS_INTERACTIVE is False


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "16-true", "bf16-mixed", "bf16-true"])
def test_precision_plugin_knows_its_type(precision: Any) -> None:
    """`DeepSpeedPrecision._desired_dtype` is the type of the weights."""
    from lightning_zero.strategies.precision import ZeroPrecision

    types = {"32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}
    plugin = compat.DeepSpeedPrecision(precision)
    assert plugin._desired_dtype == types[precision.partition("-")[0]]
    assert ZeroPrecision(precision).weights_dtype == plugin._desired_dtype
    assert issubclass(compat.DeepSpeedPrecision, L.pytorch.plugins.Precision)


def test_run_stops_as_after_a_sigterm() -> None:
    """`_signal_connector.received_sigterm` makes the loop raise; `_original_handlers` are those from before the run."""

    def own(number: int, frame: Any) -> None:
        raise AssertionError("nobody sends a signal")

    handlers = At("on_train_start", compat.handlers_before_run)
    stop = At("on_train_batch_end", compat.stop_as_terminated)
    before = signal.signal(signal.SIGTERM, own)
    try:
        with pytest.raises(SIGTERMException):
            fitted(BoringModel(), handlers, stop)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handlers.answers[0][signal.SIGTERM] is own
    assert len(stop.answers) == 1


def test_slurm_checkpoint_is_saved_before_the_requeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`_slurm_sigusr_handler_fn` saves where `_checkpoint_connector.hpc_save_path` says, and calls `scontrol`."""
    calls = tmp_path / "calls"
    command = tmp_path / "scontrol"
    command.write_text(f'#!/bin/sh\necho "$@" > {calls}\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.chdir(tmp_path)
    trainer = fitted(BoringModel())
    path = Path(compat.hpc_save_path(trainer))
    assert not path.exists()
    compat.save_and_requeue(trainer)
    assert path.is_file()
    assert calls.read_text() == "requeue 42\n"


def test_loggers_are_written_every_n_steps() -> None:
    """`_logger_connector.should_update_logs` is true, by the end of a batch, where the loggers are to be written."""
    every_second = At("on_train_start", lambda trainer: setattr(trainer, "log_every_n_steps", 2))
    asked = At("on_train_batch_end", compat.logs_this_batch)
    fitted(BoringModel(), every_second, asked, batches=4)
    assert asked.answers == [False, True, False, True]
