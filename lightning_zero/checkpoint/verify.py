"""Is a checkpoint whole?"""

from __future__ import annotations

import os
from collections.abc import Iterator

from lightning_zero.checkpoint.layout import CheckpointLocation, parse_shard_name
from lightning_zero.checkpoint.manifest import Manifest
from lightning_zero.checkpoint.shards import ShardFile
from lightning_zero.checkpoint.source import open_path
from lightning_zero.errors import CheckpointError

__all__ = ["inspect_checkpoint", "verify_checkpoint"]


def inspect_checkpoint(path: str | os.PathLike[str], *, tag: str | None = None) -> Manifest:
    """Say what a checkpoint holds. Reads no tensor data.

    Args:
        path: A sharded checkpoint's folder, a tag folder or shard in it, a Lightning, torch or safetensors file, or a
            folder of safetensors files.
        tag: Which tag of a sharded checkpoint; default: the one in its file ``latest``.

    Returns:
        Kind, stage, world size, files, and name, shape, dtype and role of every tensor.

    Raises:
        CheckpointNotFoundError: Nothing is there; names what is near.
        CheckpointError: It is no checkpoint, or files of it are missing, damaged or of another save; names each of
            them.
    """
    return open_path(path, tag).manifest


def verify_checkpoint(path: str | os.PathLike[str], *, tag: str | None = None, deep: bool = False) -> Manifest:
    """Check that every file of a checkpoint is there, whole, and of the same save.

    Args:
        path: As for :func:`inspect_checkpoint`.
        tag: As for :func:`inspect_checkpoint`.
        deep: Whether every byte is read and compared with its checksum, too.

    Returns:
        What the checkpoint holds.

    Raises:
        CheckpointError: Names every damaged, missing or stray file.
    """
    source = open_path(path, tag)
    location = source.location
    problems = list(_damaged_records(location)) if deep else []
    if problems:
        raise CheckpointError(
            "\n".join([f"The checkpoint {location.folder} cannot be used:", *(f"  - {line}" for line in problems)])
        )
    return source.manifest


def _damaged_records(location: CheckpointLocation) -> Iterator[str]:
    if location.kind == "safetensors":
        return  # the format has no checksums
    paths = [location.root] if location.kind == "torch" else sorted(location.folder.iterdir())
    for path in paths:
        if location.kind == "torch" or parse_shard_name(path.name) is not None:
            bad = ShardFile(path).damaged_records()
            if bad:
                yield f"{path.name} is damaged: its checksum does not hold for {', '.join(bad[:5])}"
