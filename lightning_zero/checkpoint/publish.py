"""How a save becomes a checkpoint: at once, and never at the cost of the one it replaces.

A new checkpoint is a hidden folder until it is whole, and gets its name in one step. Overwriting one writes a new tag
under a hidden name inside the folder, replaces ``latest`` in one step, then deletes the old tag. One process does the
steps of this module, for all that write.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import string
import time
from dataclasses import dataclass
from pathlib import Path

from lightning_zero.checkpoint.layout import LATEST
from lightning_zero.export.atomic import TEMPORARY_PREFIX, sync, write_text

__all__ = ["Save", "abandon_save", "begin_save", "publish_save", "remove"]

TAG = "checkpoint"  # the tag that Lightning's own strategy uses
_OUR_TAG = re.compile(rf"{TAG}(-[a-z]+)?")
_OWNER = "owner"
_STALE_AFTER = 24 * 3600  # seconds after which a save of another host is taken for dead


@dataclass(frozen=True)
class Save:
    """A save in progress.

    Args:
        path: The checkpoint.
        root: The folder in which the tag's folder is to be written.
        written: The name of the tag's folder while it is written.
        tag: Its name when it is whole.
        replaces: Whether ``path`` is a checkpoint folder already, so that ``root`` is ``path``.
    """

    path: Path
    root: Path
    written: str
    tag: str
    replaces: bool


def begin_save(path: Path) -> Save:
    """Makes room for a save, and clears what killed saves have left beside it.

    Args:
        path: The checkpoint's folder; it may exist.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path.parent)
    if path.is_dir() and not path.is_symlink():
        _sweep(path)
        tag = f"{TAG}-{_letters()}" if (path / TAG).exists() else TAG
        save = Save(path, path, f"{TEMPORARY_PREFIX}{_letters()}", tag, replaces=True)
    else:
        hidden = path.parent / f"{TEMPORARY_PREFIX}{_letters()}"
        save = Save(path, hidden, TAG, TAG, replaces=False)
    hidden = save.root if not save.replaces else save.root / save.written
    hidden.mkdir()
    write_text(hidden / _OWNER, f"{socket.gethostname()} {os.getpid()}")
    return save


def publish_save(save: Save) -> None:
    """Makes a complete save the checkpoint.

    Args:
        save: What :func:`begin_save` returned, with every file written.
    """
    folder = save.root / save.written
    if save.replaces:
        (folder / _OWNER).unlink()
        before = _current_tag(save.path)
        folder.rename(save.root / save.tag)
        sync(save.root)
        staged = save.root / f"{TEMPORARY_PREFIX}{_letters()}"
        write_text(staged, save.tag)
        staged.replace(save.root / LATEST)
        sync(save.root)
        _delete_old_tags(save, before)
        return
    write_text(save.root / LATEST, save.tag)
    (save.root / _OWNER).unlink()
    sync(folder)
    sync(save.root)
    if save.path.is_symlink() or save.path.exists():  # a link or a single file of this name: the folder takes its place
        aside = save.path.parent / f"{TEMPORARY_PREFIX}{_letters()}"
        save.path.rename(aside)
        save.root.rename(save.path)
        aside.unlink()
    else:
        save.root.rename(save.path)
    sync(save.path.parent)


def abandon_save(save: Save) -> None:
    """Deletes what a failed save has written.

    Args:
        save: What :func:`begin_save` returned.
    """
    shutil.rmtree(save.root / save.written if save.replaces else save.root, ignore_errors=True)


def remove(path: Path) -> None:
    """Deletes a checkpoint so that it is gone at once, not file by file.

    Args:
        path: A checkpoint's folder or file, or a link to one; nothing happens when it is not there.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    if not path.is_dir():
        return
    hidden = path.parent / f"{TEMPORARY_PREFIX}{_letters()}"
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _current_tag(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return (path / LATEST).read_text(encoding="utf-8").strip()
    return None


def _delete_old_tags(save: Save, before: str | None) -> None:
    """Deletes the tag that was replaced, and tags of ours that a kill kept from being deleted; others stay."""
    for entry in list(save.path.iterdir()):
        ours = _OUR_TAG.fullmatch(entry.name) is not None or entry.name == before
        if ours and entry.name != save.tag and entry.is_dir():
            hidden = save.path / f"{TEMPORARY_PREFIX}{_letters()}"
            entry.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def _sweep(folder: Path) -> None:
    for entry in list(folder.glob(f"{TEMPORARY_PREFIX}*")):
        if not _is_alive(entry):
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def _is_alive(hidden: Path) -> bool:
    """Whether some process may still be writing there; without an owner it was being deleted, or is seconds old."""
    try:
        host, pid = (hidden / _OWNER).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return _age(hidden) < 60
    if host != socket.gethostname():
        return _age(hidden) < _STALE_AFTER
    if int(pid) == os.getpid():
        return False  # one process saves one checkpoint at a time, so this is a save of its own that failed
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _letters() -> str:
    # Letters only: Lightning parses digits out of the names in a checkpoint folder.
    return "".join(random.SystemRandom().choices(string.ascii_lowercase, k=12))
