"""A checkpoint of any kind, opened: where each weight lies, and what the checkpoint holds beside them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from lightning_zero.checkpoint.layout import CLIENT_STATE_KEY, CheckpointLocation, locate
from lightning_zero.checkpoint.manifest import Manifest, Role, SavedFile, SavedTensor
from lightning_zero.checkpoint.merge import StoredTensor, merge
from lightning_zero.checkpoint.shards import ShardFile, TensorRef
from lightning_zero.checkpoint.states import SavedStates, open_states
from lightning_zero.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["Source", "open_path", "open_source"]

_VERSION_KEY = "pytorch-lightning_version"
_SAFETENSORS_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class Source:
    """An opened checkpoint.

    Args:
        location: Where it is.
        manifest: What it holds.
        tensors: Where each entry of the state dict lies, in the state dict's order.
        extras: State-dict entries that are no tensors.
        client_state: Lightning's state as the restricted reader gives it; empty for weights alone.
    """

    location: CheckpointLocation
    manifest: Manifest
    tensors: Mapping[str, StoredTensor]
    extras: Mapping[str, Any] = field(default_factory=dict)
    client_state: Mapping[str, Any] = field(default_factory=dict)


def open_source(location: CheckpointLocation) -> Source:
    """Open a checkpoint. Reads no tensor data.

    Args:
        location: What :func:`~lightning_zero.checkpoint.layout.locate` found.

    Returns:
        The opened checkpoint.

    Raises:
        CheckpointError: It is damaged, incomplete, or no checkpoint; names each file concerned.
    """
    return _OPENERS[location.kind](location)


def open_path(path: str | os.PathLike[str], tag: str | None = None) -> Source:
    """Find and open a checkpoint, also while another process overwrites it. Reads no tensor data.

    Args:
        path: As for :func:`~lightning_zero.checkpoint.layout.locate`.
        tag: As for :func:`~lightning_zero.checkpoint.layout.locate`.

    Returns:
        The opened checkpoint. Its files stay open, so that it can be read to the end when it is replaced meanwhile.

    Raises:
        CheckpointError: See :func:`~lightning_zero.checkpoint.layout.locate` and :func:`open_source`.
    """
    while True:
        location = locate(path, tag)
        version = location.version
        if locate(path, tag) != location:
            continue
        try:
            source = open_source(location)
        except (CheckpointError, OSError):
            if location.version == version:
                raise
        else:
            if location.version == version:
                return source


def _open_sharded(location: CheckpointLocation) -> Source:
    states = open_states(location)
    try:
        merged = merge(states)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{location.folder} is not laid out as DeepSpeed lays it out ({error!r}). "
            "Consolidate it with the zero_to_fp32.py of the DeepSpeed release that wrote it."
        ) from error
    client = states.client_state
    frozen, buffers, masters = merged.frozen, merged.buffers, merged.masters

    def role(name: str, alias_of: str | None) -> Role:
        names = {name, alias_of}
        if names & buffers:
            return "buffer"
        if names & masters:
            return "trainable"
        return "frozen" if names & frozen or (masters and states.stage > 0) else "weight"

    first = states.model[0]
    manifest = Manifest(
        path=location.root,
        tag=location.tag,
        kind="sharded",
        tensors=_saved_tensors(merged.tensors, role),
        files=tuple(_shard_files(states)),
        stage=states.stage,
        world_size=states.world_size,
        has_masters=bool(masters),
        has_optimizer=bool(states.optim) or isinstance(first.get("optimizer"), Mapping),
        step=first.get("global_steps"),
        epoch=_integer(client.get("epoch")),
        deepspeed_version=first.get("ds_version"),
        lightning_version=client.get(_VERSION_KEY),
        client_keys=tuple(map(str, client)),
        left_out=merged.left_out,
        transformers_files=location.transformers_files,
    )
    return Source(location, manifest, merged.tensors, merged.extras, client)


def _shard_files(states: SavedStates) -> Iterator[SavedFile]:
    for path, name in states.files:
        yield SavedFile(path.name, path.stat().st_size, name.role, name.rank)
    folder = states.location.folder
    for path in sorted((folder / "offloaded_tensors").glob("rank*/*.swp")):
        rank = re.search(r"\d+$", path.parent.name)
        yield SavedFile(str(path.relative_to(folder)), path.stat().st_size, "offloaded", int(rank[0]) if rank else None)


def _open_torch(location: CheckpointLocation) -> Source:
    file = ShardFile(location.root)
    content = file.content
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{location.root} holds a {type(content).__name__}, and a state dict is needed.")
    nested = content.get("state_dict")
    entries: Mapping[str, Any] = nested if isinstance(nested, Mapping) else content
    tensors: dict[str, StoredTensor] = {name: value for name, value in entries.items() if isinstance(value, TensorRef)}
    if not tensors and entries:
        keys = ", ".join(map(str, list(content)[:8]))
        raise CheckpointError(
            f"{location.root} holds no weights: neither 'state_dict' nor tensors are among its keys, which are {keys}."
        )
    client = (
        {key: value for key, value in content.items() if key not in ("state_dict", CLIENT_STATE_KEY)}
        if nested is not None
        else {}
    )
    is_lightning = _VERSION_KEY in client
    manifest = Manifest(
        path=location.root,
        tag=None,
        kind="lightning" if is_lightning else "torch",
        tensors=_saved_tensors(tensors, lambda *_: "weight"),
        files=(SavedFile(location.root.name, file.size, "weights"),),
        has_optimizer=bool(client.get("optimizer_states")),
        step=_integer(client.get("global_step")),
        epoch=_integer(client.get("epoch")),
        lightning_version=client.get(_VERSION_KEY),
        client_keys=tuple(map(str, client)),
        transformers_files=location.transformers_files,
    )
    extras = {name: value for name, value in entries.items() if name not in tensors} if nested is not None else {}
    return Source(location, manifest, tensors, extras, client)


@dataclass(frozen=True)
class _SafetensorsRef:
    """A tensor in a safetensors file."""

    path: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    handle: Any = field(compare=False, repr=False)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def identity(self) -> tuple[Any, ...]:
        return (self.path, self.key)

    def load(self) -> torch.Tensor:
        tensor: torch.Tensor = self.handle.get_tensor(self.key)
        return tensor

    def chunks(self, size: int) -> Iterator[tuple[int, torch.Tensor]]:
        flat = self.load().reshape(-1)
        for start in range(0, self.numel, size):
            yield start, flat[start : start + size]


def _open_safetensors(location: CheckpointLocation) -> Source:
    paths = [location.root] if location.root.is_file() else _safetensors_files(location.root)
    tensors: dict[str, StoredTensor] = {}
    others: dict[str, str] = {}
    for path in paths:
        try:
            handle: Any = safe_open(path, framework="pt")
            for key in handle.keys():  # noqa: SIM118  # it is no mapping
                part = handle.get_slice(key)
                tensors[key] = _SafetensorsRef(
                    path, key, tuple(part.get_shape()), _SAFETENSORS_DTYPES[part.get_dtype()], handle
                )
            others |= handle.metadata() or {}
        except (SafetensorError, KeyError) as error:  # it names the file  # it names the file
            raise CheckpointError(f"{path} is damaged or no safetensors file: {error}.") from error
    tensors |= {other: tensors[name] for other, name in others.items() if name in tensors and other not in tensors}
    files = tuple(SavedFile(path.name, path.stat().st_size, "weights") for path in paths)
    model_files = location.transformers_files
    kind: Literal["transformers", "safetensors"] = "transformers" if model_files == location.root else "safetensors"
    saved = _saved_tensors(tensors, lambda *_: "weight")
    manifest = Manifest(
        path=location.root, tag=None, kind=kind, tensors=saved, files=files, transformers_files=model_files
    )
    return Source(location, manifest, tensors)


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if len(found) > 1 and folder / "model.safetensors" in found:
            return [folder / "model.safetensors"]
        return found
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged ({error}).") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointNotFoundError(
            f"{folder} is incomplete: its index names {', '.join(missing)}, which is missing."
        )
    return [folder / name for name in names]


def _saved_tensors(tensors: Mapping[str, StoredTensor], role: Any) -> tuple[SavedTensor, ...]:
    first: dict[Any, str] = {}
    saved = []
    for name, tensor in tensors.items():
        known = first.setdefault(tensor.identity, name) if tensor.numel else name
        alias_of = known if known != name else None
        saved.append(SavedTensor(name, tuple(tensor.shape), tensor.dtype, role(name, alias_of), alias_of))
    return tuple(saved)


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) else None


_OPENERS = {"sharded": _open_sharded, "torch": _open_torch, "safetensors": _open_safetensors}
