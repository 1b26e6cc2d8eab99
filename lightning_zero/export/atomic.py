"""Results appear whole or not at all: written under a hidden name beside their place, then renamed.

Metadata is flushed to the disk before the rename; tensors are not, for the sake of speed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import socket
import string
import time
from collections.abc import Iterator
from pathlib import Path

from lightning_zero.errors import CheckpointError

__all__ = [
    "TEMPORARY_PREFIX",
    "begin_folder",
    "discard",
    "hidden_path",
    "is_abandoned",
    "publish_folder",
    "staged_file",
    "staged_folder",
    "sync",
    "write_text",
]

TEMPORARY_PREFIX = ".saving-"
"""How every hidden name begins; it never contains the final one, whose digits others may parse."""

_DEAD_AFTER = 24 * 3600  # seconds after which a hidden name of another host, or of a number used again, is given up


def hidden_path(folder: Path) -> Path:
    """A new hidden name, which says from its first moment on which process made it.

    Args:
        folder: Where it is to lie.
    """
    # Letters only: Lightning parses digits out of the names in a checkpoint folder.
    chance = "".join(random.SystemRandom().choices(string.ascii_lowercase, k=12))
    return folder / f"{TEMPORARY_PREFIX}{_number_in_letters(os.getpid())}-{_host()}-{chance}"


def is_abandoned(hidden: Path) -> bool:
    """Whether nobody is writing or deleting there any more: the process is gone, or is this one.

    Args:
        hidden: A path whose name begins with the prefix.
    """
    owner, _, rest = hidden.name.removeprefix(TEMPORARY_PREFIX).partition("-")
    if rest.partition("-")[0] != _host():
        return _age(hidden) > _DEAD_AFTER
    # A process has one thing in progress at a time, so its own are those that failed.
    gone = owner == _number_in_letters(os.getpid()) or not _runs(_number_of_letters(owner))
    return gone or _age(hidden) > _DEAD_AFTER


def begin_folder(output: Path) -> Path:
    """Make the hidden folder in which ``output`` is prepared.

    Args:
        output: The final folder. It may exist already.

    Returns:
        An empty folder on the same file system.

    Raises:
        CheckpointError: ``output`` is a file.
    """
    if output.exists() and not output.is_dir():
        raise CheckpointError(f"{output} is a file, and this format is a folder. Give another output path.")
    output.parent.mkdir(parents=True, exist_ok=True)
    hidden = hidden_path(output.parent)
    hidden.mkdir()
    return hidden


def publish_folder(hidden: Path, output: Path, stale: tuple[str, ...] = ()) -> None:
    """Give a prepared folder its final name.

    A new ``output`` appears in one step. In an ``output`` that exists, each file is replaced in one step, JSON files
    last, then files that match ``stale`` and are not among the new ones are deleted; all others stay.

    Args:
        hidden: What :func:`begin_folder` returned, filled.
        output: The final folder.
        stale: Glob patterns of an older result's files.
    """
    try:
        hidden.rename(output)
    except OSError:
        if not output.is_dir():
            raise
        new = sorted((path for path in hidden.iterdir()), key=lambda path: (path.suffix == ".json", path.name))
        for path in new:
            path.replace(output / path.name)
        names = {path.name for path in new}
        for old in (path for pattern in stale for path in output.glob(pattern)):
            if old.name not in names:
                old.unlink(missing_ok=True)
        hidden.rmdir()
    sync(output)
    sync(output.parent)


def discard(hidden: Path) -> None:
    """Delete a prepared folder or file, if it is there.

    Args:
        hidden: A hidden path of this module.
    """
    if hidden.is_dir():
        shutil.rmtree(hidden, ignore_errors=True)
    else:
        hidden.unlink(missing_ok=True)


@contextlib.contextmanager
def staged_folder(output: Path, stale: tuple[str, ...] = ()) -> Iterator[Path]:
    """Prepare a folder and publish it when the block ends well.

    Args:
        output: The final folder.
        stale: See :func:`publish_folder`.

    Yields:
        The hidden folder to fill.
    """
    hidden = begin_folder(output)
    try:
        yield hidden
        publish_folder(hidden, output, stale)
    except BaseException:
        discard(hidden)
        raise


@contextlib.contextmanager
def staged_file(output: Path) -> Iterator[Path]:
    """Prepare a file and publish it when the block ends well.

    Args:
        output: The final file. An existing one is replaced in one step.

    Yields:
        The hidden path to write to.

    Raises:
        CheckpointError: ``output`` is a folder.
    """
    if output.is_dir():
        raise CheckpointError(
            f"{output} is a folder, and this format is one file. Give a file's path, such as {output / 'model.ckpt'}."
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    hidden = hidden_path(output.parent)
    try:
        yield hidden
        hidden.replace(output)
        sync(output.parent)
    except BaseException:
        discard(hidden)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a small file and flush it to the disk.

    Args:
        path: The file.
        text: Its content.
    """
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Flush a file or a folder's list of names to the disk.

    Args:
        path: What to flush.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems cannot sync a folder
        pass
    finally:
        os.close(descriptor)


def _host() -> str:
    digest = hashlib.sha256(socket.gethostname().encode()).digest()
    return _number_in_letters(int.from_bytes(digest[:5], "big"))


def _number_in_letters(number: int) -> str:
    letters = ""
    while number or not letters:
        number, digit = divmod(number, 26)
        letters = string.ascii_lowercase[digit] + letters
    return letters


def _number_of_letters(letters: str) -> int:
    number = 0
    for letter in letters:
        number = number * 26 + string.ascii_lowercase.index(letter)
    return number


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs, for somebody else
    return True


def _age(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return 0.0
