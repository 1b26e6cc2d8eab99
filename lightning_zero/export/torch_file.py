"""A file that ``torch.load`` reads, written tensor by tensor.

``torch.save`` needs every tensor in memory at once. The file is a zip archive (a pickle, then a record for each
tensor), so it can as well be written from a stream: first the structure, with a :class:`TensorSpec` in the place of
each tensor, then the elements.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_zero.export.safetensors_dir import TensorSpec, tensor_bytes

__all__ = ["Chunks", "write_torch_file"]

Chunks = Callable[[str], Iterable[torch.Tensor]]
"""Gives the elements of a tensor by its name, in order, in as many flat pieces as suits."""

_ROOT = "archive"
_ALIGNMENT = 64  # torch.load(mmap=True) wants elements there, as torch.save places them
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}


class _Storage:
    """Stands for a storage in the pickle."""

    def __init__(self, key: str, spec: TensorSpec) -> None:
        self.key = key
        self.spec = spec


class _Pickler(pickle.Pickler):
    """Pickles each :class:`TensorSpec` as the tensor that it describes; equal names share memory."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: dict[str, _Storage] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        dtype = value.spec.dtype
        kind = _STORAGES.get(dtype, torch.UntypedStorage)
        return ("storage", kind, value.key, "cpu", value.spec.numel if dtype in _STORAGES else value.spec.nbytes)

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, TensorSpec):
            return NotImplemented
        storage = self.storages.setdefault(value.name, _Storage(str(len(self.storages)), value))
        common: tuple[Any, ...] = (storage, 0, tuple(value.shape), _strides(value.shape), False, OrderedDict())
        if value.dtype in _STORAGES:
            return torch._utils._rebuild_tensor_v2, common
        return torch._utils._rebuild_tensor_v3, (*common, value.dtype)


def write_torch_file(path: Path, content: Mapping[str, Any], chunks: Chunks) -> None:
    """Write what ``torch.save(content, path)`` would, holding one piece of one tensor at a time.

    Args:
        path: The file.
        content: Containers, scalars and tensors; a :class:`TensorSpec` stands for a tensor to come. Two specs of one
            name are one tensor.
        chunks: Called once for each spec's name.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    small = _take_tensors(content)
    pickler.dump(small.content)
    with path.open("wb") as raw, zipfile.ZipFile(raw, "w", zipfile.ZIP_STORED) as archive:
        _write_record(archive, raw, "data.pkl", len(buffer.getvalue()), [buffer.getvalue()])
        _write_record(archive, raw, "byteorder", len(sys.byteorder), [sys.byteorder.encode()])
        for name, storage in pickler.storages.items():
            pieces = [small.tensors[name]] if name in small.tensors else chunks(name)
            _write_record(archive, raw, f"data/{storage.key}", storage.spec.nbytes, _as_bytes(pieces, storage.spec))
        _write_record(archive, raw, "version", 2, [b"3\n"])


class _Taken:
    """A structure whose small tensors have been replaced by specs, and those tensors."""

    def __init__(self) -> None:
        self.content: Any = None
        self.tensors: dict[str, torch.Tensor] = {}

    def take(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name = f"\0{len(self.tensors)}"  # no state-dict key begins so
            self.tensors[name] = value.detach().cpu().contiguous()
            return TensorSpec(name, tuple(value.shape), value.dtype)
        if isinstance(value, dict):
            return {key: self.take(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return type(value)(self.take(item) for item in value)
        return value


def _take_tensors(content: Mapping[str, Any]) -> _Taken:
    taken = _Taken()
    taken.content = taken.take(dict(content))
    return taken


def _as_bytes(pieces: Iterable[torch.Tensor], spec: TensorSpec) -> Iterator[memoryview]:
    for piece in pieces:
        if piece.numel():
            yield tensor_bytes(piece.to(device="cpu", dtype=spec.dtype).contiguous())


def _write_record(archive: zipfile.ZipFile, raw: io.BufferedWriter, name: str, size: int, parts: Iterable[Any]) -> None:
    """One uncompressed record whose first byte is aligned, by a padded extra field."""
    info = zipfile.ZipInfo(f"{_ROOT}/{name}", (1980, 1, 1, 0, 0, 0))
    large = size > 0x7FFF_FFFF
    zip64_field = 20 if large else 0  # what zipfile itself adds
    start = raw.tell() + 30 + len(info.filename) + zip64_field + 4
    padding = -start % _ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    written = 0
    with archive.open(info, "w", force_zip64=large) as record:
        for part in parts:
            written += record.write(part)
    assert written == size, f"{name}: {written} bytes written, {size} planned"


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
