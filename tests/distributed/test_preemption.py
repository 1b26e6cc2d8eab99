"""A machine that is taken away: the ranks save at the same update, and stop."""

import os
import random
import signal
import stat
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_zero import verify_checkpoint
from tests.harness import ranks
from tests.models import Regression, Rows, largest_difference, loader, trainer, whole_weights

BATCHES = 40


class Slow(Regression):
    """Takes another time for each batch on each rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(random.Random(batch_idx * 7 + int(os.environ["RANK"])).uniform(0, 0.02))
        return super().training_step(batch, batch_idx)


class Manual(Slow):
    """Steps by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()


class Signal(Callback):
    """Sends a signal to this process some time after training has begun."""

    def __init__(self, number: signal.Signals, delay: float) -> None:
        self.timer = threading.Timer(delay, os.kill, (os.getpid(), number))

    def on_train_start(self, *_: Any) -> None:
        self.timer.start()


class SignalAt(Callback):
    """Sends a signal to this process in the middle of a batch."""

    def __init__(self, number: signal.Signals, batch: int) -> None:
        self.number = number
        self.batch = batch

    def on_before_backward(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.batch:
            os.kill(os.getpid(), self.number)


class Resuming:
    """A rank's own batches, which go on where a checkpoint has left them."""

    batch_size = 2

    def __init__(self) -> None:
        self.rows = Rows(BATCHES * self.batch_size, seed=int(os.environ["RANK"]))
        self.next = self.resume_at = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        self.next, self.resume_at = self.resume_at, 0
        while self.next < BATCHES:
            chosen = slice(self.next * self.batch_size, (self.next + 1) * self.batch_size)
            self.next += 1
            yield self.rows.inputs[chosen], self.rows.targets[chosen]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resume_at = state["next"]


def everywhere(value: Any) -> list[Any]:
    """The value of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def fit(module: L.LightningModule, preset: str, folder: Path, ckpt_path: Any = None, **flags: Any) -> L.Trainer:
    runner = trainer(
        preset, epochs=1, default_root_dir=folder, accumulate_grad_batches=flags.pop("windows", 1), **flags
    )
    runner.fit(module, Resuming(), ckpt_path=ckpt_path)
    return runner


@pytest.mark.parametrize(("preset", "kind"), [("zero2", Slow), ("zero3_offload", Slow), ("zero2", Manual)])
@ranks(2)
def test_signal_to_any_rank_saves_all(preset: str, kind: type[Slow], tmp_path: Path) -> None:
    """C15: sent to one rank at a random time, both save one update and stop, and a resumed run ends as one unbroken."""
    rank = int(os.environ["RANK"])
    windows = 1 if kind is Manual else 2
    whole = kind()
    fit(whole, preset, tmp_path, windows=windows)
    draw = random.Random(17)
    for attempt in range(3):
        folder = tmp_path / f"{attempt}"
        target, delay = draw.randrange(2), draw.uniform(0.0, 0.3)
        number = draw.choice([signal.SIGTERM, signal.SIGUSR1])
        callbacks = [Signal(number, delay)] if rank == target else []
        runner = trainer(
            preset, epochs=1, default_root_dir=folder, accumulate_grad_batches=windows, callbacks=callbacks
        )
        with pytest.raises(SIGTERMException):
            runner.fit(kind(), Resuming())
        saved = folder / "last-preempted.ckpt"
        verify_checkpoint(saved, deep=True)
        assert len(set(everywhere(runner.global_step))) == 1
        assert 0 < runner.global_step < BATCHES // windows
        resumed = kind()
        again = fit(resumed, preset, folder, ckpt_path=saved, windows=windows)
        assert again.global_step == BATCHES // windows
        assert resumed.lrs == whole.lrs[runner.global_step :]
        # DeepSpeed's CPU Adam multiplies its bias corrections up during a run, and raises to a power after a resume.
        rounding = 1e-6 if "offload" in preset else 0.0
        assert largest_difference(whole_weights(resumed), whole_weights(whole)) <= rounding


@ranks(1)
def test_last_finds_it(tmp_path: Path) -> None:
    """On one process too, beside the run's checkpoints, where `ckpt_path="last"` finds it when it is the newest."""
    checkpoints = {"callbacks": [ModelCheckpoint(tmp_path / "kept", save_last=True, every_n_train_steps=2)]}
    flags = {"devices": 1, "enable_checkpointing": True, "default_root_dir": tmp_path}
    stopped = SignalAt(signal.SIGUSR1, 5)
    first = trainer("zero1", epochs=1, **flags, callbacks=[*checkpoints["callbacks"], stopped])
    with pytest.raises(SIGTERMException):
        first.fit(Regression(), loader(8, ranks=1))
    assert first.received_sigterm
    assert first.global_step == 5
    resumed = Regression()
    again = trainer("zero1", epochs=1, **flags, **checkpoints)
    again.fit(resumed, loader(8, ranks=1), ckpt_path="last")
    assert again.global_step == 8
    assert len(resumed.losses) == 3


@ranks(2)
def test_slurm_starts_the_job_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C15: SLURM's signal to one rank saves where the next start of the job looks, and asks for that start once."""
    rank = int(os.environ["RANK"])
    calls = tmp_path / "calls"
    command = tmp_path / "bin" / "scontrol"
    if rank == 0:
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
    for name, value in {
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST": "localhost",
    }.items():
        monkeypatch.setenv(name, value)

    def run(callbacks: list[Callback]) -> tuple[Regression, L.Trainer]:
        module = Regression()
        runner = trainer(
            "zero2", epochs=1, default_root_dir=tmp_path, callbacks=callbacks, plugins=[SLURMEnvironment()]
        )
        runner.fit(module, loader(8))
        return module, runner

    _, first = run([SignalAt(signal.SIGUSR1, 3)] if rank == 1 else [])
    assert first.global_step == 8  # SLURM ends the job, not we
    verify_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    dist.barrier()
    assert calls.read_text() == "requeue 4711\n"
    module, second = run([])
    assert second.global_step == 8
    assert len(module.losses) == 5


@ranks(2)
def test_handlers_of_the_user(tmp_path: Path) -> None:
    """A SIGTERM handler from before the run is called too and is back afterwards; one for SIGUSR1 is left alone."""
    rank = int(os.environ["RANK"])
    seen: list[int] = []

    def own(number: int, frame: Any) -> None:
        seen.append(number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, own)
    callbacks = [SignalAt(signal.SIGUSR1, 2), SignalAt(signal.SIGTERM, 4)] if rank == 1 else []
    runner = trainer("zero1", epochs=1, default_root_dir=tmp_path, callbacks=callbacks)
    with pytest.raises(SIGTERMException):
        runner.fit(Regression(), loader(8))
    assert runner.global_step == 4
    assert seen == ([signal.SIGUSR1, signal.SIGTERM] if rank == 1 else [])
    assert signal.getsignal(signal.SIGTERM) is own


@ranks(2)
def test_no_room_to_save(tmp_path: Path) -> None:
    """A save that fails is told of, and the run stops on all ranks all the same."""
    (tmp_path / "file").touch()
    rank = int(os.environ["RANK"])
    callbacks = [SignalAt(signal.SIGTERM, 2)] if rank == 1 else []
    runner = trainer("zero2", epochs=1, default_root_dir=tmp_path / "file" / "runs", callbacks=callbacks)
    with warnings.catch_warnings(record=True) as told, pytest.raises(SIGTERMException):
        runner.fit(Regression(), loader(8))
    assert [rank] * len([warning for warning in told if "could not be saved" in str(warning.message)]) == [0][rank:]
    assert runner.global_step == 2
