"""Results appear whole or not at all: written under a hidden name beside their place, then renamed.

Metadata is flushed to the disk before the rename; tensors are not, for the sake of speed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from lightning_zero.errors import CheckpointError

__all__ = [
    "TEMPORARY_PREFIX",
    "begin_folder",
    "discard",
    "publish_folder",
    "staged_file",
    "staged_folder",
    "sync",
    "write_text",
]

TEMPORARY_PREFIX = ".saving-"
"""How every hidden name begins; it never contains the final one, whose digits others may parse."""


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
    hidden = output.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
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
    hidden = output.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
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
