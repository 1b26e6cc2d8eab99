"""How a save becomes a checkpoint: at once, and never at the cost of the one it replaces.

A new checkpoint is a hidden folder until it is whole, and gets its name in one step. Overwriting one writes a new tag
under a hidden name inside the folder, replaces ``latest`` in one step, then deletes the old tag. One process does the
steps of this module, for all that write.
"""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import string
from dataclasses import dataclass
from pathlib import Path

from lightning_zero.checkpoint.layout import LATEST
from lightning_zero.export.atomic import TEMPORARY_PREFIX, hidden_path, is_abandoned, sync, write_text

__all__ = ["Save", "abandon_save", "begin_save", "publish_save", "remove"]

TAG = "checkpoint"  # the tag that Lightning's own strategy uses
_OUR_TAG = re.compile(rf"{TAG}(-[a-z]+)?")


@dataclass(frozen=True)
class Save:
    """A save in progress.

    Args:
        path: The checkpoint.
        root: The folder in which the tag's folder lies.
        written: The name of the tag's folder while it is written; it exists.
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
        # Letters only, as in hidden names.
        new = f"{TAG}-{''.join(random.SystemRandom().choices(string.ascii_lowercase, k=12))}"
        save = Save(path, path, hidden_path(path).name, new if (path / TAG).exists() else TAG, replaces=True)
    else:
        save = Save(path, hidden_path(path.parent), TAG, TAG, replaces=False)
    (save.root / save.written).mkdir(parents=True)
    return save


def publish_save(save: Save) -> None:
    """Makes a complete save the checkpoint.

    Args:
        save: What :func:`begin_save` returned, with every file written.
    """
    if save.replaces:
        before = _current_tag(save.path)
        (save.root / save.written).rename(save.root / save.tag)
        staged = hidden_path(save.root)
        write_text(staged, save.tag)
        staged.replace(save.root / LATEST)
        sync(save.root)  # before the old tag goes
        _delete_old_tags(save, before)
        return
    write_text(save.root / LATEST, save.tag)
    if save.path.is_symlink() or save.path.exists():  # a link or a single file of this name: the folder takes its place
        aside = hidden_path(save.path.parent)
        save.path.rename(aside)
        save.root.rename(save.path)
        aside.unlink()
    else:
        save.root.rename(save.path)
    sync(save.path.parent)


def abandon_save(save: Save) -> None:
    """Deletes what a failed save has written, also when it failed while it was published.

    Args:
        save: What :func:`begin_save` returned.
    """
    if not save.replaces:
        shutil.rmtree(save.root, ignore_errors=True)
        return
    shutil.rmtree(save.root / save.written, ignore_errors=True)
    if _current_tag(save.path) != save.tag:
        shutil.rmtree(save.root / save.tag, ignore_errors=True)


def remove(path: Path) -> None:
    """Deletes a checkpoint so that it is gone at once, not file by file.

    Args:
        path: A checkpoint's folder or file, or a link to one; nothing happens when it is not there.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        _delete_at_once(path)


def _current_tag(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return (path / LATEST).read_text(encoding="utf-8").strip()
    return None


def _delete_old_tags(save: Save, before: str | None) -> None:
    """Deletes the tag that was replaced, and tags of ours that a kill kept from being deleted; others stay.

    The new checkpoint is there already, so a tag that cannot be deleted now is left to the next save.
    """
    for entry in list(save.path.iterdir()):
        ours = _OUR_TAG.fullmatch(entry.name) is not None or entry.name == before
        if ours and entry.name != save.tag and entry.is_dir():
            with contextlib.suppress(OSError):
                _delete_at_once(entry)


def _delete_at_once(folder: Path) -> None:
    hidden = hidden_path(folder.parent)
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _sweep(folder: Path) -> None:
    for entry in list(folder.glob(f"{TEMPORARY_PREFIX}*")):
        if not is_abandoned(entry):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
