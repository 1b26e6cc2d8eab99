"""Read a pickle without running anything that it names.

A checkpoint is a pickle, and a pickle may name any function to call. This reader builds plain containers, scalars and
tensor descriptions itself; every other class or function becomes an inert :class:`Opaque` record, so that DeepSpeed and
Lightning need not be installed and a hostile file executes nothing.
"""

from __future__ import annotations

import collections
import pickle
import posixpath
from collections.abc import Callable, Iterable
from typing import IO, Any

import numpy as np
import torch

__all__ = ["NOT_PLAIN", "Opaque", "RestrictedUnpickler", "storage_dtype", "to_plain"]


class Opaque:
    """What a pickle said about an object of a class that is not read.

    ``args`` holds the constructor's arguments, ``state`` what ``__setstate__`` would get, ``entries`` and ``elements``
    what was put into it as into a dict or a list. Nothing is ever called.
    """

    origin = "?"

    def __new__(cls, *args: Any, **kwargs: Any) -> Opaque:
        self = object.__new__(cls)
        self.args = args
        self.kwargs = kwargs
        self.state = None
        self.entries = {}
        self.elements = []
        return self

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Any
    entries: dict[Any, Any]
    elements: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries[key] = value

    def append(self, value: Any) -> None:
        self.elements.append(value)

    def extend(self, values: Iterable[Any]) -> None:
        self.elements.extend(values)

    def add(self, value: Any) -> None:
        self.elements.append(value)

    def __repr__(self) -> str:
        return f"<{self.origin}, not read>"


_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

_STORAGES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}


class _StorageType:
    """A storage class named by a pickle; only its dtype matters."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def storage_dtype(storage_type: Any) -> torch.dtype:
    """The dtype of a storage class as it appears in a persistent id.

    Args:
        storage_type: What :class:`RestrictedUnpickler` returned for the class.

    Returns:
        The element type.

    Raises:
        pickle.UnpicklingError: It is not a storage class.
    """
    if not isinstance(storage_type, _StorageType):
        raise pickle.UnpicklingError(f"{storage_type!r} is not a storage type")
    return storage_type.dtype


def _encode(text: str, encoding: str = "latin1") -> bytes:
    return text.encode(encoding)


def _numpy_scalar(dtype: Any, data: Any = b"") -> Any:
    if not isinstance(dtype, np.dtype) or dtype.hasobject or not isinstance(data, bytes):
        return None
    return np.frombuffer(data, dtype, count=1)[0].item()


class _NumpyDtype(Opaque):
    origin = "numpy.dtype"

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        name = args[0] if args else ""
        return np.dtype(name) if isinstance(name, str) and name[:1] in "?biufc" and len(name) <= 4 else Opaque(*args)


def _mapping(*args: Any) -> dict[Any, Any]:
    return dict(args[-1]) if args and isinstance(args[-1], (dict, list)) else {}


_SAFE: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "Counter"): collections.Counter,
    ("collections", "defaultdict"): _mapping,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("_codecs", "encode"): _encode,
    **{
        ("builtins", kind.__name__): kind
        for kind in (set, frozenset, bytearray, complex, list, dict, tuple, int, float, str)
    },
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): int,
    **{(home, "scalar"): _numpy_scalar for home in ("numpy.core.multiarray", "numpy._core.multiarray")},
    ("numpy", "dtype"): _NumpyDtype,
}


class RestrictedUnpickler(pickle.Unpickler):
    """An unpickler for what ``torch.save`` writes that calls nothing from the file.

    Args:
        file: The pickle, opened for reading bytes.
        make_storage: Called with the persistent id of each storage; what it returns is handed to ``make_tensor``.
        make_tensor: Called with (storage, offset, size, stride, dtype), in elements; a dtype of None is the storage's
            own.
    """

    def __init__(
        self,
        file: IO[bytes],
        make_storage: Callable[[Any], Any],
        make_tensor: Callable[[Any, int, tuple[int, ...], tuple[int, ...], torch.dtype | None], Any],
    ) -> None:
        super().__init__(file, encoding="utf-8")
        self._make_storage = make_storage
        self._make_tensor = make_tensor
        self._stubs: dict[tuple[str, str], Any] = {}
        self._builders: dict[tuple[str, str], Any] = {
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_tensor"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self._typed_storage_tensor,
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
            ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *_: data,
            ("torch._tensor", "_rebuild_from_type_v2"): self._typed_tensor,
        }

    def persistent_load(self, pid: Any) -> Any:
        return self._make_storage(pid)

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        if key in self._builders:
            return self._builders[key]
        if key in _SAFE:
            return _SAFE[key]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _StorageType(_STORAGES[name])
        if key not in self._stubs:
            self._stubs[key] = type(name, (Opaque,), {"origin": f"{module}.{name}"})
        return self._stubs[key]

    def _tensor(self, storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Any:
        return self._make_tensor(storage, offset, tuple(size), tuple(stride), None)

    def _typed_storage_tensor(
        self, storage: Any, offset: int, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
    ) -> Any:
        return self._make_tensor(storage, offset, tuple(size), tuple(stride), dtype)

    def _typed_tensor(self, build: Any, _kind: Any, args: Any, state: Any) -> Any:
        """A tensor with attributes: ``ds_id``, which names a swapped-out partition, is kept."""
        if build not in (self._tensor, *self._builders.values()):
            return Opaque(args, state)
        tensor = build(*args)
        attributes = state[0] if isinstance(state, tuple) and state else state
        label = attributes.get("ds_id") if isinstance(attributes, dict) else None
        return tensor if label is None else self._labelled(tensor, str(label))

    @staticmethod
    def _labelled(tensor: Any, label: str) -> Any:
        with_label = getattr(tensor, "with_label", None)
        return tensor if with_label is None else with_label(label)


class _NotPlain:
    def __repr__(self) -> str:
        return "NOT_PLAIN"


NOT_PLAIN: Any = _NotPlain()
"""What :func:`to_plain` returns for a value that cannot be said in plain types."""

_PATHS = ("pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath", "pathlib._local.WindowsPath")
_SCALARS = (str, int, float, bool, complex, bytes, type(None), torch.dtype, torch.Size, torch.device, torch.Tensor)


def to_plain(value: Any, load_tensor: Callable[[Any], Any], dropped: list[str], where: str = "") -> Any:
    """Restate a value in containers, scalars and tensors that ``torch.load(weights_only=True)`` accepts.

    Args:
        value: What the restricted reader returned.
        load_tensor: Called for each leaf that is none of the plain types; returns a tensor, or ``NOT_PLAIN``.
        dropped: Gets the dotted path and the class of everything that has no plain form.
        where: The dotted path of ``value``, for ``dropped``.

    Returns:
        The plain value, or ``NOT_PLAIN``.
    """
    if isinstance(value, _SCALARS) and not isinstance(value, Opaque):
        return value
    if isinstance(value, Opaque):
        if value.entries and not value.elements:  # a dict of another class, such as Lightning's AttributeDict
            return to_plain(value.entries, load_tensor, dropped, where)
        if value.origin in _PATHS and all(isinstance(part, str) for part in value.args):
            return posixpath.join(*value.args) if value.args else "."
        dropped.append(f"{where} ({value.origin})")
        return NOT_PLAIN
    if isinstance(value, dict):
        pairs = (
            (key, to_plain(item, load_tensor, dropped, f"{where}.{key}" if where else str(key)))
            for key, item in value.items()
        )
        return {
            key: item
            for key, item in pairs
            if item is not NOT_PLAIN and isinstance(key, (str, int, float, bool, tuple))
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [to_plain(item, load_tensor, dropped, f"{where}[{index}]") for index, item in enumerate(value)]
        kept = [item for item in items if item is not NOT_PLAIN]
        return tuple(kept) if isinstance(value, tuple) else set(kept) if isinstance(value, (set, frozenset)) else kept
    loaded = load_tensor(value)
    if loaded is NOT_PLAIN:
        dropped.append(f"{where} ({type(value).__name__})")
    return loaded
