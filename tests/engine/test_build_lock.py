"""Case R7: torch's lock is removed when no live process can be holding it, and never before."""

import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_zero.engine import build_lock
from lightning_zero.engine.build_lock import build_turn, pass_lock

# As torch.utils.file_baton does it: the file is open from the moment it exists.
_HOLD = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print(flush=True); time.sleep(600)"
_TAKE_TURN = """
import fcntl, sys, time
turn = open(sys.argv[1], "a")
fcntl.flock(turn, fcntl.LOCK_EX)
print(flush=True)
time.sleep(600)
"""


@contextmanager
def started(*command: str, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives at most as long as the block."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def seconds_until_passed(lock: Path) -> float:
    """How long :func:`pass_lock` takes."""
    start = time.monotonic()
    pass_lock(lock)
    return time.monotonic() - start


def test_no_lock_costs_nothing(tmp_path: Path) -> None:
    """Without a lock there is nothing to wait for and nothing to report."""
    start = time.monotonic()
    assert pass_lock(tmp_path / "lock") is False
    assert time.monotonic() - start < 0.1


def test_a_lock_that_nobody_holds_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A planted lock is gone within seconds, and a line says so."""
    lock = tmp_path / "lock"
    lock.touch()
    assert seconds_until_passed(lock) < 5
    assert not lock.exists()
    assert f"removing {lock}" in caplog.text


def test_the_lock_of_a_live_build_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As long as its holder lives the lock stays, and the line names the holder; after a kill it is removed."""
    lock = tmp_path / "lock"
    with started(sys.executable, "-c", _HOLD, str(lock)) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with started("sh", "-c", f"sleep 5; touch {tmp_path}/held-{holder.pid}; kill -9 {holder.pid}"):
            waited = seconds_until_passed(lock)
    assert (tmp_path / f"held-{holder.pid}").exists()
    assert 4 < waited < 15
    assert f"is held by process {holder.pid}" in caplog.text
    assert not lock.exists()


def test_a_compiler_that_outlives_its_builder_is_waited_for(tmp_path: Path) -> None:
    """A ninja whose python was killed still writes into the folder: the lock stays until it ends."""
    build = tmp_path / "build"
    build.mkdir()
    lock = build / "lock"
    lock.touch()
    shutil.copy(shutil.which("sleep") or "", tmp_path / "ninja")
    with started(str(tmp_path / "ninja"), "3", cwd=build):
        assert 2.5 < seconds_until_passed(lock) < 10


@pytest.mark.parametrize("device", ["nfs4", "fuse.sshfs"])
def test_a_lock_on_a_network_filesystem_must_be_old(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another host's process cannot be seen, so a lock there is removed only after a long silence."""
    lock = tmp_path / "lock"
    lock.touch()
    monkeypatch.setattr(build_lock, "_filesystem", lambda folder: device)
    monkeypatch.setattr(build_lock, "_QUIET", 5.0)
    assert 4 < seconds_until_passed(lock) < 15
    assert "rm " in caplog.text


def test_the_filesystem_of_a_folder() -> None:
    """The kernel's table of mounts says what a folder lies on."""
    assert build_lock._filesystem(Path("/proc/self")) == "proc"


def test_a_turn_is_exclusive_and_ends_with_its_holder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A second process waits, saying so, and goes on when the first is killed."""
    path = tmp_path / "op.turn"
    caplog.set_level(logging.WARNING)
    with started(sys.executable, "-c", _TAKE_TURN, str(path)) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        start = time.monotonic()
        with started("sh", "-c", f"sleep 5; kill -9 {holder.pid}"), build_turn(path, say=True):
            waited = time.monotonic() - start
    assert 4 < waited < 15
    assert f"({path})" in caplog.text
