"""safetensors files, written piece by piece into places that are known beforehand.

The safetensors library writes a file from tensors that are all in memory. Here a plan is made from names, shapes and
dtypes alone, so that any process or thread can write any part of any file at any time, holding only that part; the
bytes do not depend on who writes what. The format (https://github.com/huggingface/safetensors#format) is a length, a
JSON header and the elements; the files are byte for byte those of ``safetensors.torch.save_file``.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from lightning_zero.errors import CheckpointError
from lightning_zero.export.atomic import write_text

__all__ = [
    "STALE",
    "PlannedFile",
    "SafetensorsPlan",
    "SafetensorsWriter",
    "TensorSpec",
    "plan_safetensors",
    "tensor_bytes",
]

INDEX = "model.safetensors.index.json"
STALE = ("model.safetensors", "model-*-of-*.safetensors", INDEX)
"""Patterns of the files that an older export may have left in a folder."""

_CODES = {  # in the order in which the library lays tensors out: wide ones first, so that each is aligned
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = {dtype: place for place, dtype in enumerate(_CODES)}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written: its name, shape and dtype in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class PlannedFile:
    """One file: its name, its first bytes, where each tensor begins, and its size in bytes."""

    name: str
    header: bytes
    offsets: Mapping[str, int]
    size: int


@dataclass(frozen=True)
class SafetensorsPlan:
    """Which tensor goes where.

    Args:
        files: The files, in order of their numbers.
        specs: Every tensor by name, in the order given.
        total_size: Bytes of all tensors.
    """

    files: tuple[PlannedFile, ...]
    specs: Mapping[str, TensorSpec]
    total_size: int

    @cached_property
    def file_of(self) -> dict[str, PlannedFile]:
        """The file of each tensor, in the order of the tensors."""
        homes = {name: file for file in self.files for name in file.offsets}
        return {name: homes[name] for name in self.specs}

    @property
    def main_dtype(self) -> torch.dtype | None:
        """The floating-point dtype of most bytes, or None without any."""
        sizes: dict[torch.dtype, int] = {}
        for spec in self.specs.values():
            if spec.dtype.is_floating_point:
                sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.nbytes
        return max(sizes, key=lambda dtype: sizes[dtype], default=None)

    def write_index(self, folder: Path) -> None:
        """Write the index that names each tensor's file, if there are several files. One process calls it.

        Args:
            folder: Where the files are.
        """
        if len(self.files) < 2:
            return
        weight_map = {name: file.name for name, file in sorted(self.file_of.items())}
        index = {"metadata": {"total_size": self.total_size}, "weight_map": weight_map}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")


def plan_safetensors(
    specs: Iterable[TensorSpec], max_shard_size: int, aliases: Mapping[str, str] | None = None
) -> SafetensorsPlan:
    """Distribute tensors over files: in order, a new file when the next tensor would not fit.

    Args:
        specs: Tensors, each once.
        max_shard_size: Most bytes of tensors in one file; a larger tensor gets a file of its own.
        aliases: Other names of these tensors (tied weights): other name to name. They are kept in the files' metadata.

    Returns:
        The plan.

    Raises:
        CheckpointError: safetensors has no such dtype.
    """
    known = {spec.name: spec for spec in specs}
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in known.values():
        if spec.dtype not in _CODES:
            raise CheckpointError(f"safetensors has no dtype for {spec.name!r} ({spec.dtype}). Use format='torch'.")
        if groups[-1] and filled + spec.nbytes > max_shard_size:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += spec.nbytes
    count = len(groups)
    names = (
        ["model.safetensors"]
        if count == 1
        else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    )
    files = tuple(_plan_file(name, group, aliases or {}) for name, group in zip(names, groups, strict=True))
    return SafetensorsPlan(files, known, sum(spec.nbytes for spec in known.values()))


def _plan_file(file_name: str, specs: Sequence[TensorSpec], aliases: Mapping[str, str]) -> PlannedFile:
    here = {spec.name for spec in specs}
    metadata = {"format": "pt"} | {other: name for other, name in sorted(aliases.items()) if name in here}
    entries: dict[str, object] = {"__metadata__": metadata}
    offsets = {}
    position = 0
    for spec in sorted(specs, key=lambda spec: (_ORDER[spec.dtype], spec.name)):
        offsets[spec.name] = position
        entries[spec.name] = {
            "dtype": _CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.nbytes],
        }
        position += spec.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return PlannedFile(
        file_name, header, {name: len(header) + offset for name, offset in offsets.items()}, len(header) + position
    )


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a contiguous CPU tensor, not copied.

    Args:
        tensor: Any shape and dtype.
    """
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


class SafetensorsWriter:
    """Writes tensors, or parts of them, to their planned places; safe to share between threads.

    Several processes may each have a writer for the same plan and folder.

    Args:
        plan: What goes where.
        folder: An existing folder.
    """

    def __init__(self, plan: SafetensorsPlan, folder: Path) -> None:
        self.plan = plan
        self._folder = folder
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def put(self, name: str, tensor: torch.Tensor, start: int = 0) -> int:
        """Write a tensor, or its elements from ``start`` on.

        Args:
            name: A planned name.
            tensor: The elements in row-major order, any shape, on any device; converted to the planned dtype.
            start: Position of the first one in the whole tensor.

        Returns:
            Bytes written.
        """
        spec, file = self.plan.specs[name], self.plan.file_of[name]
        assert start + tensor.numel() <= spec.numel, (
            f"{name}: {start} + {tensor.numel()} elements, {spec.numel} planned"
        )
        data = (
            tensor_bytes(tensor.to(device="cpu", dtype=spec.dtype).contiguous()) if tensor.numel() else memoryview(b"")
        )
        descriptor = self._descriptor(file)
        position = file.offsets[name] + start * spec.dtype.itemsize
        done = 0
        while done < len(data):
            done += os.pwrite(descriptor, data[done:], position + done)
        return done

    def prepare(self) -> None:
        """Make every file, so that files of empty tensors exist too. One process calls it."""
        for file in self.plan.files:
            self._descriptor(file)

    def close(self) -> None:
        """Close the files."""
        with self._lock, contextlib.ExitStack() as closing:
            for descriptor in self._open.values():
                closing.callback(os.close, descriptor)
            self._open.clear()

    def _descriptor(self, file: PlannedFile) -> int:
        with self._lock:
            if file.name not in self._open:
                descriptor = os.open(self._folder / file.name, os.O_WRONLY | os.O_CREAT, 0o666)
                self._open[file.name] = descriptor
                os.truncate(descriptor, file.size)
                os.pwrite(descriptor, file.header, 0)  # every writer writes the same bytes
            return self._open[file.name]
