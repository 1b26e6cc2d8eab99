"""What a checkpoint holds, without its values."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import torch

__all__ = ["Manifest", "SavedFile", "SavedTensor"]

Role = Literal["trainable", "frozen", "buffer", "weight"]


@dataclass(frozen=True)
class SavedTensor:
    """One entry of the state dict.

    Args:
        name: Its key.
        shape: Its whole shape.
        dtype: As stored: float32 where the optimizer's own copy of the weights was saved.
        role: ``trainable``, ``frozen`` or ``buffer``; ``weight`` where the file does not say which.
        alias_of: The earlier name of the same memory, when weights are tied.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: Role
    alias_of: str | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class SavedFile:
    """One file: name relative to the checkpoint, bytes, what it is for, and the rank that wrote it."""

    name: str
    size: int
    role: Literal["model", "optim", "offloaded", "weights"]
    rank: int | None = None


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Args:
        path: The checkpoint's folder, or its file.
        tag: The tag that was read; None unless sharded.
        kind: ``sharded``, ``lightning`` (one file), ``torch`` (a state dict in one file), ``safetensors`` or
            ``transformers``.
        stage: ZeRO stage, or None.
        world_size: Number of ranks that saved it, or None.
        tensors: Every entry of the state dict, in its order.
        files: Every file that belongs to it.
        has_masters: Whether weights come in the optimizer's precision (fp32) rather than in the 16-bit one.
        has_optimizer: Whether training can go on from it.
        step: Optimizer steps taken, or None.
        epoch: Lightning's epoch, or None.
        deepspeed_version: Writer's version, or None.
        lightning_version: Writer's version, or None.
        client_keys: Keys of Lightning's state.
        left_out: State-dict names that the save excluded.
        transformers_files: Folder of the transformers ``config.json``, or None.
    """

    path: Path
    tag: str | None
    kind: Literal["sharded", "lightning", "torch", "safetensors", "transformers"]
    tensors: tuple[SavedTensor, ...]
    files: tuple[SavedFile, ...]
    stage: int | None = None
    world_size: int | None = None
    has_masters: bool = False
    has_optimizer: bool = False
    step: int | None = None
    epoch: int | None = None
    deepspeed_version: str | None = None
    lightning_version: str | None = None
    client_keys: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    transformers_files: Path | None = None

    @property
    def aliases(self) -> dict[str, str]:
        """Tied names: each later name with the first one."""
        return {tensor.name: tensor.alias_of for tensor in self.tensors if tensor.alias_of is not None}

    @property
    def numel(self) -> int:
        """Elements of all parameters and buffers, tied ones counted once."""
        return sum(tensor.numel for tensor in self.tensors if tensor.alias_of is None)

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.size for file in self.files)
