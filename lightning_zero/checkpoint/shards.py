"""One file of a checkpoint, opened without loading it: its pickle is read, its tensors are described by where their
bytes lie.

``torch.save`` writes a zip archive that holds a pickle and one uncompressed record for each storage, so that a tensor
is a range of bytes of the file. Those ranges are mapped into memory when they are asked for: they are never a second
copy.
"""

from __future__ import annotations

import mmap
import pickle
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lightning_zero.checkpoint.unpickle import RestrictedUnpickler, storage_dtype
from lightning_zero.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["RawFile", "ShardFile", "StorageRef", "TensorRef"]

_LOCAL_HEADER = struct.Struct(
    "<4s22xHH"
)  # signature, ..., length of the name, length of the extra field (zip specification, 4.3.7)
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


class RawFile:
    """The bytes of a file, mapped on first use.

    Args:
        path: The file. It stays open while tensors made from it live.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def size(self) -> int:
        """Bytes in the file."""
        return self.path.stat().st_size

    @cached_property
    def _buffer(self) -> mmap.mmap:
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
        """A flat tensor over bytes of the file: shape (numel,), copy-on-write, no memory of its own.

        Args:
            dtype: Element type.
            offset: First byte.
            numel: Elements.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._buffer, dtype=dtype, count=numel, offset=offset)


@dataclass(frozen=True)
class StorageRef:
    """A record of a file: ``numel`` elements of ``dtype`` from byte ``start`` on."""

    file: RawFile
    key: str
    dtype: torch.dtype
    start: int
    numel: int


@dataclass(frozen=True)
class TensorRef:
    """A tensor that lies in a file: where, its shape and strides (in elements), and a label that DeepSpeed gave it."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    label: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self.storage.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for two names of the same memory."""
        return (self.storage.file.path, self.storage.key, self.offset, self.shape, self.stride)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements follow one another in the file."""
        expected = 1
        for extent, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if extent != 1 and step != expected:
                return False
            expected *= extent
        return True

    def with_label(self, label: str) -> TensorRef:
        """The same tensor with DeepSpeed's own id for it."""
        return replace(self, label=label)

    def flat(self, start: int, numel: int) -> torch.Tensor:
        """Elements ``start`` to ``start + numel`` of a contiguous tensor: shape (numel,), mapped.

        Args:
            start: First element.
            numel: Elements.
        """
        byte = self.storage.start + (self.offset + start) * self.dtype.itemsize
        return self.storage.file.tensor(self.dtype, byte, numel)

    def load(self) -> torch.Tensor:
        """The tensor, mapped where the file allows it."""
        if self.numel == 0 or self.is_contiguous:
            return self.flat(0, self.numel).view(self.shape)
        whole = self.storage.file.tensor(self.dtype, self.storage.start, self.storage.numel)
        return whole.as_strided(self.shape, self.stride, self.offset)

    def chunks(self, size: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The elements in row-major order, as (first element, flat tensor of at most ``size`` elements).

        Args:
            size: Most elements in one chunk.
        """
        flat = None if self.is_contiguous else self.load().contiguous().view(-1)
        for start in range(0, self.numel, size):
            count = min(size, self.numel - start)
            yield start, self.flat(start, count) if flat is None else flat[start : start + count]


class ShardFile(RawFile):
    """A file written by ``torch.save``.

    Args:
        path: The file.

    Raises:
        CheckpointNotFoundError: It is not there.
        CheckpointError: It is truncated or was not written by ``torch.save``.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            with zipfile.ZipFile(path) as archive:
                records = archive.infolist()
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"{path} is missing.") from None
        except zipfile.BadZipFile:
            raise CheckpointError(self._why_not_a_zip(path)) from None
        self._root = next(
            (record.filename[: -len("data.pkl")] for record in records if record.filename.endswith("/data.pkl")), None
        )
        if self._root is None:
            raise CheckpointError(
                f"{path} is a zip archive that torch.save did not write. Give a checkpoint's file or folder."
            )
        self._records = {record.filename: record for record in records}
        for record in records:
            if record.compress_type != zipfile.ZIP_STORED or record.header_offset + record.file_size > self.size:
                raise CheckpointError(
                    f"{path} is damaged: the record {record.filename!r} does not lie inside the file."
                )

    @staticmethod
    def _why_not_a_zip(path: Path) -> str:
        with path.open("rb") as file:
            head = file.read(len(_LEGACY_MAGIC))
        if head == _LEGACY_MAGIC:
            return (
                f"{path} was written without torch's zip serialization, which cannot be mapped. Save again with "
                '"checkpoint": {"checkpoint_serialization": true} in the DeepSpeed config.'
            )
        if not head:
            return f"{path} is empty: its save did not finish."
        if head[:2] == b"PK":
            size = path.stat().st_size
            return f"{path} is truncated ({size} bytes, no end of archive): its save or copy did not finish."
        return f"{path} is not a file that torch.save wrote."

    @cached_property
    def content(self) -> Any:
        """What was saved, with a :class:`TensorRef` in the place of each tensor. Reads no tensor data."""
        order = self._records.get(f"{self._root}byteorder")
        if order is not None and self._bytes(order).decode() != sys.byteorder:
            raise CheckpointError(f"{self.path} was written on a machine of the other byte order. Convert it there.")
        storages: dict[str, StorageRef] = {}

        def make_storage(pid: Any) -> StorageRef:
            kind, storage_type, key = pid[0], pid[1], str(pid[2])
            if kind != "storage":
                raise pickle.UnpicklingError(f"unknown persistent id {kind!r}")
            if key not in storages:
                storages[key] = self._storage(key, storage_dtype(storage_type))
            return storages[key]

        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(f"{self._root}data.pkl") as file:
                return RestrictedUnpickler(file, make_storage, self._tensor).load()
        except CheckpointError:
            raise
        except (
            pickle.UnpicklingError,
            zipfile.BadZipFile,
            EOFError,
            TypeError,
            ValueError,
            KeyError,
            IndexError,
        ) as error:
            raise CheckpointError(f"{self.path} is damaged: its pickle cannot be read ({error}).") from error

    def damaged_records(self) -> list[str]:
        """Names of the records whose bytes do not match their checksum. Reads the whole file."""
        bad = []
        view = memoryview(self._buffer)
        for name, record in self._records.items():
            start = self._data_offset(record)
            if zlib.crc32(view[start : start + record.file_size]) != record.CRC and record.CRC != 0:
                bad.append(name.removeprefix(self._root or ""))
        return bad

    def _bytes(self, record: zipfile.ZipInfo) -> bytes:
        start = self._data_offset(record)
        return self._buffer[start : start + record.file_size]

    def _data_offset(self, record: zipfile.ZipInfo) -> int:
        head = self._buffer[record.header_offset : record.header_offset + _LOCAL_HEADER.size]
        signature, name, extra = _LOCAL_HEADER.unpack(head)
        start = int(record.header_offset + _LOCAL_HEADER.size + name + extra)
        if signature != b"PK\x03\x04" or start + record.file_size > self.size:
            raise CheckpointError(
                f"{self.path} is damaged: the record {record.filename!r} does not lie inside the file."
            )
        return start

    def _storage(self, key: str, dtype: torch.dtype) -> StorageRef:
        record = self._records.get(f"{self._root}data/{key}")
        if record is None:
            raise CheckpointError(f"{self.path} is damaged: the tensor record data/{key} is missing.")
        return StorageRef(self, key, dtype, self._data_offset(record), record.file_size // dtype.itemsize)

    def _tensor(
        self,
        storage: Any,
        offset: int,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: Any,
    ) -> TensorRef:
        if not isinstance(storage, StorageRef) or not isinstance(dtype, (torch.dtype, type(None))):
            raise CheckpointError(f"{self.path} is damaged: a tensor of shape {size} has no storage.")
        if dtype is not None:
            storage = replace(storage, dtype=dtype, numel=storage.numel * storage.dtype.itemsize // dtype.itemsize)
        last = offset + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
        inside = 0 in size or (offset >= 0 and min((*size, *stride), default=0) >= 0 and last < storage.numel)
        if not inside:
            raise CheckpointError(
                f"{self.path} is damaged: a tensor of shape {size} does not fit into its record data/{storage.key}."
            )
        return TensorRef(storage, offset, size, stride)
