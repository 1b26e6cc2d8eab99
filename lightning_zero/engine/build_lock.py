"""Whose turn it is to compile an op on this host, and what to do with the lock of a build that was killed.

Two locks guard a build. Ours is an advisory one (``flock``), which the kernel releases when its holder dies. torch's is
a file that a killed process leaves behind, after which every later start on the host waits for ever. A process that has
our lock and sees torch's knows that none of ours is compiling. Whether somebody else is, the host's processes tell:
torch keeps its lock open while it builds, and a compiler that outlives its builder works in the lock's folder.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)

SAY_AFTER = 3.0
"""Seconds of waiting or building after which a line says so."""

_LOOK_AGAIN = 1.0  # seconds; a live holder is seen without the file open between closing and removing it
_QUIET = 600.0  # seconds without a change after which a lock is stale although its holder might be out of sight
_PROCESSES = Path("/proc")
_COMPILERS = ("as", "c++", "cc1plus", "cicc", "clang", "clang++", "collect2", "g++", "ld", "ninja", "nvcc", "ptxas")
_REMOTE_FILESYSTEMS = ("9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gluster", "gpfs", "lustre", "nfs", "smb")


@contextmanager
def build_turn(path: Path, *, say: bool) -> Iterator[None]:
    """Waits for the host's other processes of ours that build, then holds the turn until the end of the block.

    Args:
        path: The file that stands for the turn. It stays when the turn ends; what is in it is the caller's.
        say: Whether a line says so when it takes long.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as turn:
        started = time.monotonic()
        while not _take(turn.fileno()):
            if say and time.monotonic() - started > SAY_AFTER:
                _log.warning("waiting for another process on this host, which builds DeepSpeed's ops (%s)", path)
                fcntl.flock(turn, fcntl.LOCK_EX)
                break
            time.sleep(0.05)
        yield  # closing the file gives the turn back, and so does the death of the process


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def pass_lock(lock: Path) -> bool:
    """Waits until torch's lock is gone, and removes it when nobody can be holding it any more.

    Call it in one's :func:`build_turn` only.

    Args:
        lock: torch's lock file; mostly it is not there.

    Returns:
        Whether the lock was that of a build that never ended.
    """
    started = time.monotonic()
    said = False
    while (seen := _Sighting.of(lock)) is not None:
        if not seen.holders and _may_be_removed(seen):
            time.sleep(_LOOK_AGAIN)
            if _Sighting.of(lock) == seen:
                _log.warning("removing %s: the process that built there is gone", lock)
                lock.unlink(missing_ok=True)
                return True
        elif not said and time.monotonic() - started > SAY_AFTER:
            said = True
            _log.warning("waiting for a build to end: %s is held by %s", lock, _describe(seen))
        time.sleep(0.1)
    return False


@dataclass(frozen=True)
class _Sighting:
    """torch's lock as it was at one moment; equal ones are of the same build."""

    path: Path
    inode: int
    created: int  # ns; inode numbers are used again soon
    owner: int
    holders: tuple[int, ...]  # processes of this host that have the file open or compile in its folder

    @classmethod
    def of(cls, lock: Path) -> _Sighting | None:
        try:
            status = lock.stat()
        except FileNotFoundError:
            return None
        holders = {*_processes_with(status), *_compilers_in(lock.parent)}
        return cls(lock, status.st_ino, status.st_ctime_ns, status.st_uid, tuple(sorted(holders)))


def _processes_with(file: os.stat_result) -> Iterator[int]:
    """Processes, as far as their open files may be read, that have the file open."""
    for descriptor in _PROCESSES.glob("[0-9]*/fd/*"):
        try:
            status = descriptor.stat()
        except OSError:  # closed or ended since; another user's are not even listed
            continue
        if os.path.samestat(status, file):
            yield int(descriptor.parts[-3])


def _compilers_in(folder: Path) -> Iterator[int]:
    """Compilers whose working directory is the folder: ninja starts them there."""
    for process in _PROCESSES.glob("[0-9]*"):
        try:
            compiles = (process / "comm").read_text().strip() in _COMPILERS
            if compiles and (process / "cwd").samefile(folder):
                yield int(process.name)
        except OSError:  # ended since, or another user's
            continue


def _may_be_removed(seen: _Sighting) -> bool:
    """Whether the holder would have been seen if it lived; if not, only a long silence tells."""
    in_sight = (
        _PROCESSES.is_dir()
        and os.geteuid() in (0, seen.owner)
        and not _filesystem(seen.path.parent).startswith(_REMOTE_FILESYSTEMS)
    )
    return in_sight or time.time() - _last_change(seen.path.parent) > _QUIET


def _filesystem(folder: Path) -> str:
    """The type of the filesystem that a folder lies on, as in ``mount``; empty when the kernel does not say."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in (_PROCESSES / "self" / "mountinfo").read_text().splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == wanted:
            return source.split()[0]
    return ""


def _last_change(folder: Path) -> float:
    """When a file in the folder was last written, in seconds since the epoch: a compiler writes as it goes."""
    return max((entry.stat().st_mtime for entry in os.scandir(folder)), default=0.0)


def _describe(seen: _Sighting) -> str:
    if not seen.holders:
        return f"a process that cannot be seen from here. If there is none: rm {seen.path}"
    return ", ".join(f"process {pid} ({_command(pid)})" for pid in seen.holders)


def _command(pid: int) -> str:
    try:
        words = (_PROCESSES / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "ended"
    return b" ".join(words).decode(errors="replace").strip()[:80]
