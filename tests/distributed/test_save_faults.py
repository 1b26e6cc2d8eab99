"""Saves of live engines that are killed, run out of disk, or are called by some ranks only."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_zero import CheckpointError, ZeroStrategy
from lightning_zero.checkpoint.consolidate import load_full_state_dict
from lightning_zero.checkpoint.publish import abandon_save, begin_save
from lightning_zero.checkpoint.verify import verify_checkpoint
from lightning_zero.engine import initialize, state
from lightning_zero.engine.accelerator import select_accelerator
from lightning_zero.engine.session import EngineSession
from lightning_zero.strategies.checkpoints import save_sharded
from tests.checkpoint.numbered import number_of
from tests.harness import collect_outcomes, ranks, run_ranks
from tests.models import Regression, body, largest_difference, loader, trainer, whole_weights


def fitted(stage: Any, module: Regression | None = None, **arguments: Any) -> tuple[Regression, L.Trainer]:
    """A module trained for two updates, with its engine."""
    module = module or Regression("adamw")
    runner = trainer(ZeroStrategy(stage=stage, **arguments), epochs=1, devices=int(os.environ["WORLD_SIZE"]))
    runner.fit(module, loader(batches=2))
    return module, runner


def save_until_killed(folder: Path, first: int, seconds: float) -> None:
    """Saves new checkpoints and overwrites one in turn, each weight being the save's number, until it is killed."""
    select_accelerator("cpu")
    initialize.join_process_group("gloo", int(os.environ["LOCAL_RANK"]), timedelta(seconds=60))
    module = body()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 2 + first % 2},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(module.parameters())
    session = EngineSession(module, config, device=torch.device("cpu"), local_rank=0, optimizer=optimizer)
    torch.distributed.barrier()
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for number in range(first, first + 100):
        weights = {name: torch.full(shape, float(number)) for name, shape in state.tensor_shapes(module).items()}
        state.set_weights(module, weights, masters=session.masters)
        name = "last.ckpt" if number % 2 else f"epoch={number}.ckpt"
        save_sharded(session, {"epoch": number}, folder / name, exclude_frozen=False)
        if torch.distributed.get_rank() == 0:
            (folder / "staged").write_text(str(number))
            (folder / "staged").rename(folder / "completed")


def test_all_ranks_killed_while_they_save(tmp_path: Path) -> None:
    """C16: after kills at random moments every checkpoint on offer is whole, bit for bit, and the newest is at least as
    new as the last save that returned.
    """
    chance = random.Random(3)
    numbers = []
    for kill in range(6):
        first = 101 + kill * 101  # stages 3 and 2 in turn
        outcomes = collect_outcomes(save_until_killed, 2, tmp_path, first, chance.uniform(0.05, 0.5))
        assert [outcome.exitcode for outcome in outcomes] == [-signal.SIGKILL, -signal.SIGKILL], outcomes
        completed = int((tmp_path / "completed").read_text()) if (tmp_path / "completed").exists() else 0
        found = {path.name: number_of(path) for path in tmp_path.glob("*.ckpt")}
        assert max(found.values(), default=0) >= completed
        assert all(number == int(name[6:-5]) for name, number in found.items() if name != "last.ckpt")
        numbers.append(completed)
        for path in (tmp_path / "last.ckpt", tmp_path / "next.ckpt"):
            abandon_save(begin_save(path))
        assert list(tmp_path.glob("**/.saving-*")) == []
        for path in tmp_path.glob("epoch=*.ckpt"):
            shutil.rmtree(path)
    assert numbers[-1] > numbers[0] > 0


@ranks(2)
def test_twenty_saves_into_fresh_folders(tmp_path: Path) -> None:
    """C10: twenty new checkpoints, each in a folder that nobody has made yet, are whole."""
    module, runner = fitted(3)
    expected = whole_weights(module)
    for number in range(20):
        runner.save_checkpoint(tmp_path / f"{number}" / "deep" / "run.ckpt")
    for number in range(20):
        path = tmp_path / f"{number}" / "deep" / "run.ckpt"
        assert verify_checkpoint(path, deep=True).world_size == 2
        assert [entry.name for entry in path.parent.iterdir()] == ["run.ckpt"]
    fresh = Regression("adamw")
    trainer(ZeroStrategy(stage=3)).test(fresh, loader(), ckpt_path=path, verbose=False)
    assert largest_difference(whole_weights(fresh), expected) == 0


class SavesOnOneRank(Callback):
    """What users write under ``if trainer.is_global_zero``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.is_global_zero:
            trainer.save_checkpoint(self.path)


def save_on_one_rank(path: Path, weights_only: bool) -> None:
    module = Regression("sgd")
    strategy = ZeroStrategy(stage=3, timeout=timedelta(seconds=4))
    if weights_only:  # and the other rank does not go on, but waits for something else
        runner = trainer(strategy, epochs=1)
        runner.fit(module, loader(batches=1))
        if runner.is_global_zero:
            runner.save_checkpoint(path, weights_only=True)
        else:
            threading.Event().wait(60)
    else:
        trainer(strategy, callbacks=[SavesOnOneRank(path)]).fit(module, loader())


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_save_on_one_rank_is_an_error(weights_only: bool, tmp_path: Path) -> None:
    """C12: only rank 0 saves while the other trains on or waits: an error that says what to write, nothing saved."""
    first, _ = collect_outcomes(save_on_one_rank, 2, tmp_path / "run.ckpt", weights_only, timeout=60, grace=0.5)
    assert not first.hung
    assert first.error is not None
    assert "the other ranks are not saving" in first.error
    assert "Call `trainer.save_checkpoint` on all ranks" in first.error
    assert list(tmp_path.iterdir()) == []


@contextmanager
def full_disk(rank: int) -> Iterator[None]:
    """On one rank no file grows beyond a size that its log stays under."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if int(os.environ["RANK"]) == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_a_full_disk(stage: int, tmp_path: Path) -> None:
    """A disk that is full for one rank is one error on all ranks, and leaves the previous checkpoint alone."""
    _, runner = fitted(stage, Wide("adamw"))
    path = tmp_path / "last.ckpt"
    runner.save_checkpoint(path)
    latest = (path / "latest").read_text()
    for rank in (0, 1):
        for target in (path, tmp_path / "new.ckpt"):
            told = rf"saving .* failed on rank {rank}: .*is the disk full"
            with pytest.raises(CheckpointError, match=told), full_disk(rank):
                runner.save_checkpoint(target)
    with pytest.raises(CheckpointError, match=r"saving .* failed: .*File too large"), full_disk(0):
        runner.save_checkpoint(tmp_path / "new.ckpt", weights_only=True)
    assert (path / "latest").read_text() == latest
    assert [entry.name for entry in path.iterdir() if entry.is_dir()] == [latest]
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
    verify_checkpoint(path, deep=True)
    runner.save_checkpoint(path)  # every rank is still in step
    assert (path / "latest").read_text() != latest


class Wide(Regression):
    """Large enough for the optimizer's states to be swapped, in shards of whole disk blocks."""

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(4)
            layers = [torch.nn.Linear(7, 2048), torch.nn.Linear(2048, 512), torch.nn.Linear(512, 3)]
            self.net = torch.nn.Sequential(*layers)


@pytest.mark.usefixtures("nvme_ops")
def test_swap_files_are_saved_twice(tmp_path: Path) -> None:
    """C9: with NVMe offload a checkpoint can be overwritten, a disk that is full for a swap file is an error, and a new
    process goes on from it; one that has made other parameters, whose swap files are named otherwise, is refused.
    """
    saved = run_ranks(save_swap_files, 2, tmp_path, timeout=180)[0]
    assert largest_difference(run_ranks(resume_swap_files, 2, tmp_path, timeout=180)[0], saved) == 0


def resume_swap_files(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / "runs" / "last.ckpt"
    for module in (Wide("sgd"), Wide("sgd")):
        runner = trainer(ZeroStrategy(stage=3, offload_optimizer="nvme", nvme_path=folder / "swap"), epochs=1)
        if torch.distributed.is_initialized():
            with pytest.raises(CheckpointError, match=r"other numbers.*Resume in a new process"):
                runner.fit(module, loader(batches=2), ckpt_path=path)
        else:
            runner.fit(module, loader(batches=2), ckpt_path=path)
            weights = whole_weights(module)
    return weights


def save_swap_files(folder: Path) -> dict[str, torch.Tensor]:
    swap = folder / "swap"
    swap.mkdir(exist_ok=True)
    module = Wide("sgd")
    runner = trainer(ZeroStrategy(stage=3, offload_optimizer="nvme", nvme_path=swap), epochs=1)
    runner.fit(module, loader(batches=2))
    path = folder / "runs" / "last.ckpt"
    tags = []
    for _ in range(2):
        runner.save_checkpoint(path)
        tags.append((path / "latest").read_text())
    for rank in (0, 1):
        with pytest.raises(CheckpointError, match=f"failed on rank {rank}"), full_disk(rank):
            runner.save_checkpoint(path)
    assert tags[0] != tags[1] == (path / "latest").read_text()
    manifest = verify_checkpoint(path, deep=True)
    assert {file.rank for file in manifest.files if file.role == "offloaded"} == {0, 1}
    assert [entry.name for entry in path.iterdir() if entry.is_dir()] == [tags[1]]
    weights = whole_weights(module)
    assert largest_difference(dict(load_full_state_dict(path)), weights) == 0
    return weights


def save_for_world(path: Path) -> dict[str, torch.Tensor]:
    module, runner = fitted(2)
    runner.save_checkpoint(path)
    return whole_weights(module)


def test_a_smaller_world_overwrites_a_larger_one(tmp_path: Path) -> None:
    """C11: two ranks save, then one overwrites it: no shard of the second rank is left, and the weights are new."""
    path = tmp_path / "last.ckpt"
    old, _ = run_ranks(save_for_world, 2, path)
    [new] = run_ranks(save_for_world, 1, path)
    manifest = verify_checkpoint(path, deep=True)
    assert manifest.world_size == 1
    assert list(path.glob("**/*rank_1_*")) == []
    assert largest_difference(old, new) > 0
    assert largest_difference(dict(load_full_state_dict(path)), new) == 0
