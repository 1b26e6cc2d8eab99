"""A save is a checkpoint at once or not at all, whatever happens while it is made."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from lightning_zero import CheckpointError
from lightning_zero.checkpoint.consolidate import load_full_state_dict
from lightning_zero.checkpoint.publish import abandon_save, begin_save, publish_save, remove
from lightning_zero.checkpoint.verify import verify_checkpoint
from lightning_zero.export.atomic import hidden_path, is_abandoned
from tests.checkpoint.numbered import NumberedShards, number_of
from tests.harness import run_ranks

FORK = multiprocessing.get_context("fork")
FILE_EVENTS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree", "tests.half"}


def save(shards: NumberedShards, path: Path, number: int) -> None:
    """A whole save of both ranks by one process."""
    started = begin_save(path)
    for rank in (0, 1):
        shards.write(started.root / started.written, number, rank)
    publish_save(started)


def in_child(work: Callable[[], None]) -> int:
    """Runs ``work`` in a forked process, which ends without clearing anything up; returns its exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_after(events: int, work: Callable[[], None]) -> bool:
    """Whether ``work`` came to its ``events``-th step on the file system, where its process ends at once."""
    left = events

    def count(event: str, _: Any) -> None:
        nonlocal left
        if event in FILE_EVENTS:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def body() -> None:
        sys.addaudithook(count)
        work()

    code = in_child(body)
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def kill_at_every_step(folder: Path, old: str) -> int:
    """Kills a save at its first step, its second, and so on until one comes through; returns how many were killed."""
    shards = NumberedShards()
    path = folder / "last.ckpt"
    events = 0
    while True:
        before = events * 10
        if old == "overwritten":
            save(shards, path, before)
        came_through = not killed_after(events, partial(save, shards, path, before + 1))
        if old == "overwritten":
            assert number_of(path) in (before, before + 1)
        elif path.exists():
            assert number_of(path) == before + 1
        else:
            with pytest.raises(CheckpointError, match="does not exist"):
                verify_checkpoint(path)
        save(shards, path, before + 2)
        assert number_of(path) == before + 2
        assert [entry.name for entry in folder.iterdir()] == ["last.ckpt"]
        assert sum(entry.is_dir() for entry in path.iterdir()) == 1
        assert len(list(path.iterdir())) == 2
        if came_through:
            return events
        events += 1
        if old == "new":
            remove(path)


@pytest.mark.parametrize("old", ["new", "overwritten"])
def test_a_kill_at_every_step(old: str, tmp_path: Path) -> None:
    """C16: killed at each of its steps on the file system, a save leaves what was there or what it wrote, whole, and
    the next save clears the rest.
    """
    [killed] = run_ranks(kill_at_every_step, 1, tmp_path, old)
    assert killed > 10


def rank_zero(shards: NumberedShards, folder: Path, first: int, other: Connection) -> None:
    for number in range(first, first + 100):
        path = folder / ("last.ckpt" if number % 2 else f"epoch={number}.ckpt")
        started = begin_save(path)
        other.send((started.root / started.written, number))
        shards.write(started.root / started.written, number, 0)
        other.recv()
        publish_save(started)
        (folder / "staged").write_text(str(number))
        (folder / "staged").rename(folder / "completed")


def rank_one(shards: NumberedShards, other: Connection) -> None:
    while True:
        folder, number = other.recv()
        shards.write(folder, number, 1)
        other.send("written")


def kill_at_random(folder: Path, kills: int) -> tuple[set[str], int]:
    """Two processes save in a loop and are killed; returns what kinds of remains there were, and the last number."""
    shards = NumberedShards()
    chance = random.Random(7)
    remains: set[str] = set()
    for kill in range(kills):
        ours, theirs = FORK.Pipe()
        both = [
            FORK.Process(target=rank_zero, args=(shards, folder, 1 + kill * 100, ours)),
            FORK.Process(target=rank_one, args=(shards, theirs)),
        ]
        for process in both:
            process.start()
        time.sleep(chance.uniform(0.01, 0.09))
        for process in both:
            process.kill()
        for process in both:
            process.join()
            assert process.exitcode == -signal.SIGKILL
        completed = int((folder / "completed").read_text()) if (folder / "completed").exists() else 0
        checkpoints = [number_of(path) for path in folder.glob("*.ckpt")]
        assert max(checkpoints, default=0) >= completed
        assert all(number_of(path) == int(path.stem.split("=")[1]) for path in folder.glob("epoch=*.ckpt"))
        remains |= {str(hidden.parent.name) for hidden in folder.glob("**/.saving-*")}
        for path in (folder / "last.ckpt", folder / "next.ckpt"):
            save(shards, path, completed)
        assert list(folder.glob("**/.saving-*")) == []
        assert number_of(folder / "last.ckpt") == completed
        for path in [*folder.glob("epoch=*.ckpt"), folder / "next.ckpt"]:
            remove(path)
    return remains, completed


def test_kills_at_random_moments(tmp_path: Path) -> None:
    """C16: two processes that save new checkpoints and overwrite one are killed at thirty random moments; the newest on
    offer is whole and at least as new as the last save that returned.
    """
    [(remains, completed)] = run_ranks(kill_at_random, 1, tmp_path, 30)
    assert remains == {tmp_path.name, "last.ckpt"}  # kills fell into both kinds of saves
    assert completed > 1000


def read_while_overwritten(path: Path, overwrites: int) -> tuple[int, int]:
    """Reads ``path`` in a loop while another process overwrites it; returns how often, and how often a new one came."""
    shards = NumberedShards()
    save(shards, path, 0)

    def overwrite() -> None:
        for number in range(1, overwrites + 1):
            save(shards, path, number)

    writer = FORK.Process(target=overwrite)
    writer.start()
    reads, seen = 0, [0]
    while writer.is_alive():
        manifest = verify_checkpoint(path)
        weights = load_full_state_dict(path)
        name = next(name for name in weights if weights[name].is_floating_point())
        values = set(weights[name].flatten().tolist())
        assert len(values) == 1
        assert manifest.epoch is not None and manifest.epoch <= values.pop()
        seen.append(manifest.epoch)
        reads += 1
    assert writer.exitcode == 0
    assert seen == sorted(seen)
    assert number_of(path) == overwrites
    return reads, len(set(seen))


def test_a_reader_always_finds_a_whole_checkpoint(tmp_path: Path) -> None:
    """C20: while one process overwrites ``last.ckpt`` 200 times, another finds, verifies and reads it throughout."""
    [(reads, different)] = run_ranks(read_while_overwritten, 1, tmp_path / "last.ckpt", 200)
    assert reads > 20
    assert different > 10


def make_and_wait(folder: Path) -> None:
    hidden_path(folder).mkdir()
    time.sleep(60)


def test_what_others_are_writing_is_left_alone(tmp_path: Path) -> None:
    """A hidden folder of a live process, or of another host, survives a save beside it; one of a dead process does not.

    The name alone says whose it is, so that there is no moment in which that is unknown.
    """
    alive = FORK.Process(target=make_and_wait, args=(tmp_path,))
    alive.start()
    while not (found := list(tmp_path.iterdir())):
        time.sleep(0.01)
    foreign = tmp_path / ".saving-1234567890abcdef"
    foreign.mkdir()
    abandon_save(begin_save(tmp_path / "run.ckpt"))
    assert sorted(tmp_path.iterdir()) == sorted([*found, foreign])
    assert not is_abandoned(found[0])
    alive.kill()
    alive.join()
    assert is_abandoned(found[0])
    os.utime(foreign, (0, 0))
    abandon_save(begin_save(tmp_path / "run.ckpt"))
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_cannot_be_published_leaves_nothing(tmp_path: Path) -> None:
    """When ``latest`` cannot be replaced, the new tag is deleted and the old one stays."""
    path = tmp_path / "run.ckpt"
    (path / "checkpoint").mkdir(parents=True)
    (path / "latest").mkdir()
    started = begin_save(path)
    with pytest.raises(IsADirectoryError):
        publish_save(started)
    abandon_save(started)
    abandon_save(begin_save(path))  # clears the text that was to become ``latest``
    assert sorted(entry.name for entry in path.iterdir()) == ["checkpoint", "latest"]
