"""Partitions to whole tensors: which ranges of which files make up each entry of the module's state dict.

DeepSpeed keeps the fp32 weights of a run in flat buffers cut into one partition for each rank. How a parameter's
elements lie in them differs by stage (``deepspeed/runtime/zero/stage_1_and_2.py``, ``stage3.py``):

* stages 1 and 2: each group's parameters are laid end to end (with ``param_alignment_paddings`` between them), then the
  whole is cut into equal parts, so that a parameter may cross from one rank's partition into the next;
* stage 3: each parameter is padded to a multiple of the number of ranks and cut by itself; a rank's parts of a group's
  parameters are laid end to end;
* stage 0: nothing is cut; with 16-bit weights the fp32 copies are a list without names.

Frozen parameters are in no group: their 16-bit values are whole at stages 0-2 and cut like the others at stage 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from lightning_zero.checkpoint.shards import RawFile, StorageRef, TensorRef
from lightning_zero.checkpoint.states import SavedStates
from lightning_zero.checkpoint.unsharded import unnamed_masters
from lightning_zero.errors import CheckpointError

__all__ = ["Merged", "MergedTensor", "StoredTensor", "lay_out", "merge"]

Names = Mapping[str, Sequence[int]]
Parts = Sequence[Sequence[TensorRef]]
"""Flat partitions, by group and then by rank."""


class StoredTensor(Protocol):
    """A whole tensor on disk, in one piece or in several."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def numel(self) -> int: ...

    @property
    def identity(self) -> tuple[Any, ...]: ...

    def load(self) -> torch.Tensor: ...

    def chunks(self, size: int) -> Iterator[tuple[int, torch.Tensor]]: ...


@dataclass(frozen=True)
class MergedTensor:
    """A tensor of ``shape`` whose elements are ``pieces``, one after another: (part of a file, first element,
    elements).
    """

    shape: tuple[int, ...]
    pieces: tuple[tuple[TensorRef, int, int], ...]

    @property
    def dtype(self) -> torch.dtype:
        """Element type as stored."""
        return self.pieces[0][0].dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for two names of the same memory."""
        first, start, _ = self.pieces[0]
        return (*first.identity, start, self.shape)

    def load(self) -> torch.Tensor:
        """The whole tensor: mapped when it lies in one piece, else copied together."""
        if len(self.pieces) == 1:
            ref, start, numel = self.pieces[0]
            return ref.flat(start, numel).view(self.shape)
        whole = torch.empty(self.numel, dtype=self.dtype)
        position = 0
        for ref, start, numel in self.pieces:
            whole[position : position + numel] = ref.flat(start, numel)
            position += numel
        return whole.view(self.shape)

    def chunks(self, size: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The elements in order, as (first element, flat tensor of at most ``size`` elements), each mapped.

        Args:
            size: Most elements in one chunk.
        """
        position = 0
        for ref, start, numel in self.pieces:
            for done in range(0, numel, size):
                count = min(size, numel - done)
                yield position + done, ref.flat(start + done, count)
            position += numel

    def span(self, start: int, numel: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Elements ``start`` to ``start + numel``, as (first element after ``start``, flat tensor), each mapped."""
        position = 0
        for ref, begin, held in self.pieces:
            low, high = max(start, position), min(start + numel, position + held)
            if low < high:
                yield low - start, ref.flat(begin + low - position, high - low)
            position += held


@dataclass(frozen=True)
class Merged:
    """The module's state dict as it lies on disk.

    Args:
        tensors: Every entry, in the state dict's order. Two names of one parameter have equal ``identity``.
        extras: State-dict entries that are no tensors (``get_extra_state``).
        masters: Names whose values are the optimizer's own copy (fp32 in every mixed-precision mode).
        frozen: Names of parameters that the optimizer does not own.
        buffers: Names of buffers.
        left_out: Names that the save excluded (``exclude_frozen_parameters``), as far as known.
    """

    tensors: dict[str, TensorRef | MergedTensor]
    extras: dict[str, Any]
    masters: frozenset[str]
    frozen: frozenset[str]
    buffers: frozenset[str]
    left_out: tuple[str, ...]


def merge(states: SavedStates) -> Merged:
    """Work out where every entry of the state dict lies. Reads no tensor data (but see ``unsharded``).

    Args:
        states: An opened checkpoint.

    Returns:
        The entries.

    Raises:
        CheckpointError: Partitions do not add up to the shapes, or the weights were not saved.
    """
    first = states.model[0]
    module: Mapping[str, Any] = first["module"]
    buffers = frozenset(first.get("buffer_names") or ())
    masters = _MASTERS[states.stage](states) if states.optim or states.stage == 0 else {}
    if states.stage == 3 and not masters and first.get("param_shapes"):
        raise CheckpointError(
            f"{states.location.folder} holds no weights: at stage 3 they are in the *_optim_states.pt files, and there "
            "are none. Restore those files, or use a checkpoint that was saved with its optimizer."
        )
    frozen: dict[str, TensorRef | MergedTensor] = dict(_frozen(states))
    shared: Mapping[str, str] = first.get("shared_params") or {}
    same_memory = _owners_by_memory(module, {**masters, **frozen})
    tensors: dict[str, TensorRef | MergedTensor] = {}
    extras: dict[str, Any] = {}
    left_out = []
    for name, value in module.items():
        if not isinstance(value, TensorRef):
            extras[name] = value
            continue
        known = masters.get(name) or frozen.get(name)
        if known is None and shared.get(name) in tensors and _may_share(states, tensors[shared[name]], value):
            known = tensors[shared[name]]
        known = known or same_memory.get(_memory(value))
        if known is not None:
            tensors[name] = known
        elif states.stage < 3 or name in buffers or value.numel:
            tensors[name] = value
        else:
            left_out.append(name)
    return Merged(tensors, extras, frozenset(masters), frozenset(frozen), buffers, tuple(left_out))


def _may_share(states: SavedStates, known: TensorRef | MergedTensor, value: TensorRef) -> bool:
    """Below stage 3 DeepSpeed tells shared parameters by address, which all empty ones have in common."""
    return states.stage == 3 or tuple(known.shape) == value.shape


def _memory(ref: TensorRef) -> tuple[Any, ...]:
    """What two names of one parameter have in common in the module's part, where stage 3 leaves empty placeholders."""
    return (ref.storage.key, ref.offset, ref.shape)


def _owners_by_memory(
    module: Mapping[str, Any], known: Mapping[str, TensorRef | MergedTensor]
) -> dict[tuple[Any, ...], TensorRef | MergedTensor]:
    """The parameter that lies in each place of the module's part, where it is but one.

    DeepSpeed's list of shared parameters leaves out those of a submodule that has two names.
    """
    found: dict[tuple[Any, ...], TensorRef | MergedTensor | None] = {}
    for name, ref in module.items():
        if name in known and isinstance(ref, TensorRef):
            place = _memory(ref)
            found[place] = None if place in found else known[name]
    return {place: owner for place, owner in found.items() if owner is not None}


def lay_out(states: SavedStates, partitions: Parts) -> dict[str, MergedTensor]:
    """The parameters whose elements lie in flat partitions, by name.

    Args:
        states: An opened checkpoint of stage 1, 2 or 3.
        partitions: What the optimizer keeps for its groups: the fp32 weights, or one of Adam's moments.

    Raises:
        CheckpointError: The partitions do not add up to the shapes.
    """
    return _partitioned(states, partitions) if states.stage == 3 else _flat(states, partitions)


def _flat_masters(states: SavedStates) -> dict[str, MergedTensor]:
    """Stages 1 and 2."""
    return _flat(states, list(zip(*(state["single_partition_of_fp32_groups"] for state in states.optim), strict=True)))


def _flat(states: SavedStates, partitions: Parts) -> dict[str, MergedTensor]:
    found: dict[str, MergedTensor] = {}
    shapes: Sequence[Names] = states.model[0]["param_shapes"]
    all_paddings = states.optim[0].get("param_alignment_paddings")  # since DeepSpeed 0.19
    for group, names in enumerate(shapes):
        parts = partitions[group]
        paddings = all_paddings[group] if all_paddings else ()
        offset = 0
        for index, (name, shape) in enumerate(names.items()):
            numel = prod(shape)
            found[name] = MergedTensor(tuple(shape), _cut(parts, offset, numel, name, states.location.folder))
            offset += numel + (paddings[index] if paddings else 0)
        held = sum(part.numel for part in parts)
        if held - offset >= 4 * states.world_size + 1:  # at most the alignment of the end remains
            raise CheckpointError(
                f"{states.location.folder}: the partitions of group {group} hold {held} elements, and its parameters "
                f"{offset}. The shards are not of the same run as the model file."
            )
    return found


def _cut(
    parts: Sequence[TensorRef], start: int, numel: int, name: str, folder: Path
) -> tuple[tuple[TensorRef, int, int], ...]:
    """The pieces that make up elements ``start`` to ``start + numel`` of ``parts`` laid end to end."""
    pieces = []
    position = 0
    end = start + numel
    for part in parts:
        low, high = max(start, position), min(end, position + part.numel)
        if low < high:
            pieces.append((part, low - position, high - low))
        position += part.numel
    if end > position:
        raise CheckpointError(
            f"{folder}: the partitions end before the parameter {name!r}: {position} elements, and {end} are needed."
        )
    return tuple(pieces) or ((parts[0], 0, 0),)


def _partitioned_masters(states: SavedStates) -> dict[str, MergedTensor]:
    """Stage 3."""
    flats = (_swapped_in(states, rank) for rank in range(states.world_size))
    return _partitioned(states, list(zip(*flats, strict=True)))


def _partitioned(states: SavedStates, partitions: Parts) -> dict[str, MergedTensor]:
    found: dict[str, MergedTensor] = {}
    for group, names in enumerate(states.model[0]["param_shapes"]):
        parts = partitions[group]
        offset = 0
        for name, shape in names.items():
            found[name] = _rejoin(parts, offset, tuple(shape))
            offset += -(-prod(shape) // states.world_size)
        for rank, part in enumerate(parts):
            if part.numel != offset:
                raise CheckpointError(
                    f"{states.location.folder}: rank {rank}'s partition of group {group} holds {part.numel} elements, "
                    f"and its parameters need {offset}. The shards are not of the same run."
                )
    return found


def _rejoin(parts: Sequence[TensorRef], offset: int, shape: tuple[int, ...]) -> MergedTensor:
    """A parameter of which each rank holds an equal part from ``offset`` on, the last ones padded."""
    left = prod(shape)
    share = -(-left // len(parts))
    pieces = []
    for part in parts:
        count = min(share, left)
        left -= count
        if count:
            pieces.append((part, offset, count))
    return MergedTensor(shape, tuple(pieces) or ((parts[0], 0, 0),))


def _swapped_in(states: SavedStates, rank: int) -> list[TensorRef]:
    """A rank's flat groups at stage 3, those on NVMe taken from the copies in the checkpoint."""
    flats: list[TensorRef] = list(states.optim[rank]["fp32_flat_groups"])
    for group, flat in enumerate(flats):
        if flat.numel or flat.label is None:
            continue
        names = states.model[0]["param_shapes"][group]
        numel = sum(-(-prod(shape) // states.world_size) for shape in names.values())
        path = _swap_file(states.location.folder, rank, flat.label)
        file = RawFile(path)
        if not path.is_file() or file.size < numel * flat.dtype.itemsize:
            what = "is shorter than its partition" if path.is_file() else "is missing"
            raise CheckpointError(f"The checkpoint {states.location.folder} cannot be used:\n  - {path} {what}")
        flats[group] = TensorRef(StorageRef(file, flat.label, flat.dtype, 0, numel), 0, (numel,), (1,), flat.label)
    return flats


def _swap_file(folder: Path, rank: int, label: str) -> Path:
    return folder / "offloaded_tensors" / f"rank{rank:02d}" / f"{label}.tensor.swp"


def _frozen(states: SavedStates) -> Iterator[tuple[str, TensorRef | MergedTensor]]:
    """Parameters outside the optimizer, where DeepSpeed recorded them (stages 2 and 3)."""
    first = states.model[0]
    shapes: Names = first.get("frozen_param_shapes") or {}
    for name, shape in shapes.items():
        parts: list[TensorRef] = [state["frozen_param_fragments"][name] for state in states.model]
        yield name, _rejoin(parts, 0, tuple(shape)) if states.stage == 3 else parts[0]


_MASTERS = {
    0: lambda states: unnamed_masters(states.model[0]),
    1: _flat_masters,
    2: _flat_masters,
    3: _partitioned_masters,
}
