"""Where the parts of a checkpoint lie, and what a path that a user gave stands for.

A sharded checkpoint is a folder that DeepSpeed defines::

    latest                                                    the tag to load, a line of text
    <tag>/mp_rank_00_model_states.pt                          stages 0-2: buffers, weights, Lightning's state
    <tag>/zero_pp_rank_<r>_mp_rank_00_model_states.pt         stage 3: the same, one for each rank
    <tag>/[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt  stages 1-3: each rank's fp32 weights and optimizer state
    <tag>/offloaded_tensors/rank<rr>/<id>.tensor.swp          NVMe offload: partitions that were swapped out

To these ``lightning_zero`` adds two things that other readers ignore::

    transformers/             what ``save_pretrained`` writes beside the weights (config.json, ...)
    transformers/module.json  {"prefix": "model."}: where in the LightningModule the transformers model sits

and one key in Lightning's state, ``lightning_zero``, that exports leave out. A save in progress is a folder whose name
starts with ``.saving-``; it is never a checkpoint.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_zero.errors import CheckpointError, CheckpointNotFoundError
from lightning_zero.export.atomic import TEMPORARY_PREFIX

__all__ = [
    "CLIENT_STATE_KEY",
    "LATEST",
    "TRANSFORMERS_FOLDER",
    "CheckpointLocation",
    "ShardName",
    "locate",
    "parse_shard_name",
    "tags",
]

LATEST = "latest"
TRANSFORMERS_FOLDER = "transformers"
CLIENT_STATE_KEY = "lightning_zero"

Kind = Literal["sharded", "torch", "safetensors"]

_SHARD = re.compile(
    r"(?P<bf16>bf16_)?(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_(?P<role>model|optim)_states\.pt", re.ASCII
)
_INDEX = "model.safetensors.index.json"
_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://")


@dataclass(frozen=True)
class ShardName:
    """What a shard's file name says: ``role``, ``rank`` (None in the one model file of stages 0-2), model-parallel
    rank.
    """

    role: Literal["model", "optim"]
    rank: int | None
    model_parallel_rank: int
    bf16: bool


def parse_shard_name(name: str) -> ShardName | None:
    """Read a shard's file name.

    Args:
        name: A file name, without folder.

    Returns:
        Its parts, or None when no shard is named so.
    """
    found = _SHARD.fullmatch(name)
    if found is None:
        return None
    rank = found["rank"]
    role: Literal["model", "optim"] = "model" if found["role"] == "model" else "optim"
    return ShardName(role, None if rank is None else int(rank), int(found["mp"]), found["bf16"] is not None)


@dataclass(frozen=True)
class CheckpointLocation:
    """A checkpoint that was found.

    Args:
        kind: ``sharded`` (DeepSpeed's folder), ``torch`` (one file of ``torch.save``: Lightning's, or a state dict) or
            ``safetensors`` (a file, or a folder with or without an index, such as a transformers folder).
        root: The sharded checkpoint's folder, or the single file, or the folder of safetensors files.
        tag: The subfolder of ``root`` that holds the shards; None unless sharded.
    """

    kind: Kind
    root: Path
    tag: str | None = None

    @property
    def folder(self) -> Path:
        """The folder that holds the shards."""
        return self.root if self.tag is None else self.root / self.tag

    @property
    def version(self) -> tuple[int, int] | None:
        """Another value after every overwrite, although a tag's name may come back."""
        try:
            found = (self.root / LATEST if self.kind == "sharded" else self.root).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    @property
    def transformers_files(self) -> Path | None:
        """The folder in which a transformers ``config.json`` lies, or None."""
        home = self.root if self.root.is_dir() else self.root.parent
        candidates = (home / TRANSFORMERS_FOLDER, home) if self.root.is_dir() else (home / TRANSFORMERS_FOLDER,)
        return next((folder for folder in candidates if (folder / "config.json").is_file()), None)


def tags(root: Path) -> list[str]:
    """The tags in a checkpoint's folder, sorted; half-written ones are left out.

    Args:
        root: A folder.
    """
    with os.scandir(root) as entries:
        names = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    return sorted(name for name in names if _holds_shards(root / name))


def locate(path: str | os.PathLike[str], tag: str | None = None) -> CheckpointLocation:
    """Find the checkpoint that a path stands for.

    Args:
        path: A sharded checkpoint's folder, one of its tag folders, a shard in it, a Lightning or torch file, a
            safetensors file, or a folder of safetensors such as a transformers folder.
        tag: Which tag of a sharded checkpoint; default: the one in ``latest``, or the only one there is.

    Returns:
        Kind, root and tag.

    Raises:
        CheckpointNotFoundError: Nothing is there, or not that tag; names what is near.
        CheckpointError: What is there is no checkpoint, or cannot be told apart from another one.
    """
    text = os.fspath(path)
    if _URL.match(text):
        raise CheckpointError(
            f"{text} is a remote URL, and checkpoints are read from local paths only. Copy it to a local disk first."
        )
    where = Path(text).absolute()
    if where.name.startswith(TEMPORARY_PREFIX):
        raise CheckpointError(
            f"{where} is a save that did not finish. Use another checkpoint: {_listing(_checkpoints_in(where.parent))}."
        )
    if not where.exists():
        raise CheckpointNotFoundError(f"{where} does not exist.{_near(where)}")
    if where.is_dir():
        return _locate_folder(where, tag)
    if parse_shard_name(where.name) is not None:
        return _from_tag_folder(where.parent, tag)
    if where.name == LATEST and tags(where.parent):
        return _locate_folder(where.parent, tag)
    if tag is not None:
        raise CheckpointError(f"{where} is a single file and has no tags. Leave out tag={tag!r}.")
    return CheckpointLocation("safetensors" if where.suffix == ".safetensors" else "torch", where)


def _locate_folder(folder: Path, tag: str | None) -> CheckpointLocation:
    if (folder / LATEST).is_file() or (tag is not None and (folder / tag).is_dir()):
        return _from_root(folder, tag)
    if _holds_shards(folder):
        return _from_tag_folder(folder, tag)
    found = tags(folder)
    if found:
        return _from_root(folder, tag)
    if (folder / _INDEX).is_file() or any(folder.glob("*.safetensors")):
        if tag is not None:
            raise CheckpointError(f"{folder} holds safetensors files and has no tags. Leave out tag={tag!r}.")
        return CheckpointLocation("safetensors", folder)
    if (folder / "pytorch_model.bin").is_file():
        return CheckpointLocation("torch", folder / "pytorch_model.bin")
    if (folder / "zero").is_dir() or (folder / "latest_universal").is_file():
        raise CheckpointError(
            f"{folder} is a DeepSpeed universal checkpoint. Give the checkpoint that it was converted from."
        )
    inside = _checkpoints_in(folder)
    if inside:
        raise CheckpointError(
            f"{folder} is no checkpoint but holds {len(inside)}. Give one of them: {_listing(inside)}."
        )
    raise CheckpointError(
        f"{folder} is no checkpoint: it holds neither shards (*_states.pt) nor weights (*.safetensors).{_near(folder)}"
    )


def _from_tag_folder(folder: Path, tag: str | None) -> CheckpointLocation:
    if folder.name.startswith(TEMPORARY_PREFIX):
        raise CheckpointError(f"{folder} is a save that did not finish. Give the checkpoint's folder, {folder.parent}.")
    if tag is not None and tag != folder.name:
        raise CheckpointError(
            f"{folder} is the folder of tag {folder.name!r}, and tag={tag!r} was asked for. Give {folder.parent}."
        )
    return CheckpointLocation("sharded", folder.parent, folder.name)


def _from_root(root: Path, tag: str | None) -> CheckpointLocation:
    latest = root / LATEST
    found = tags(root)
    if tag is None and latest.is_file():
        tag, found = _latest_tag(latest)
        if not tag:
            raise CheckpointError(f"{latest} is empty, so the tag is unknown. Pass tag=, one of: {_listing(found)}.")
        if tag not in found:
            raise CheckpointError(f"{latest} names the tag {tag!r}, which is not in {root}. {_choose(found)}")
    if tag is None:
        if len(found) > 1:
            raise CheckpointError(f"{root} has no file 'latest' and several tags. {_choose(found)}")
        tag = found[0]
    if tag not in found:
        raise CheckpointNotFoundError(f"{root} has no tag {tag!r} with shards. {_choose(found)}")
    return CheckpointLocation("sharded", root, tag)


def _latest_tag(latest: Path) -> tuple[str, list[str]]:
    """The tag to load and all that are there, seen at one moment although the checkpoint may be overwritten."""
    while True:
        tag = latest.read_text(encoding="utf-8").strip()
        found = tags(latest.parent)
        if tag in found or latest.read_text(encoding="utf-8").strip() == tag:
            return tag, found


def _holds_shards(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(parse_shard_name(entry.name) is not None for entry in entries)
    except (NotADirectoryError, FileNotFoundError, PermissionError):
        return False


def _checkpoints_in(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    return [name for name in names if name.endswith((".ckpt", ".safetensors")) or (folder / name / LATEST).is_file()]


def _near(where: Path) -> str:
    parent = where.parent
    while not parent.exists():
        where, parent = parent, parent.parent
    with os.scandir(parent) as entries:
        siblings = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    close = difflib.get_close_matches(where.name, [name for name in siblings if name != where.name], n=3, cutoff=0.6)
    if not close:
        close = [name for name in _checkpoints_in(parent) if name != where.name][:3]
    return f" Near it: {', '.join(str(parent / name) for name in close)}." if close else ""


def _choose(found: Iterable[str]) -> str:
    names = list(found)
    return (
        f"Pass tag=, one of: {_listing(names)}."
        if names
        else "No tag is there: the save did not finish, or the folder was moved in part."
    )


def _listing(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "") if shown else "none"
