"""Stage 0: the fp32 copies of 16-bit weights, which DeepSpeed saves without their names.

Its fp16 and bf16 optimizers keep ``fp32_groups`` (a list of tensors for each group) or ``fp32_groups_flat`` (one tensor
for each group), in the order of the optimizer's parameters. Names are found again by value: a 16-bit weight is its fp32
copy, rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_zero.checkpoint.shards import TensorRef

if TYPE_CHECKING:
    from lightning_zero.checkpoint.merge import MergedTensor

__all__ = ["unnamed_masters"]

_HALF = (torch.float16, torch.bfloat16)


def unnamed_masters(state: Mapping[str, Any]) -> dict[str, MergedTensor]:
    """The fp32 copy of each 16-bit weight of a stage-0 checkpoint. Reads the weights.

    Args:
        state: The model file's content.

    Returns:
        The copies by name; empty when the weights are fp32 themselves, when no copies were saved, or when any copy
        cannot be told apart from the others (so that a result never mixes copies with rounded weights).
    """
    from lightning_zero.checkpoint.merge import MergedTensor

    optimizer = state.get("optimizer")
    if not isinstance(optimizer, Mapping):
        return {}
    buffers = frozenset(state.get("buffer_names") or ())
    waiting = {
        name: ref
        for name, ref in state["module"].items()
        if isinstance(ref, TensorRef) and ref.dtype in _HALF and ref.numel and name not in buffers
    }
    found: dict[str, MergedTensor] = {}
    for flat in _flats(optimizer):
        start = 0
        while start < flat.numel:
            name = next((name for name, ref in waiting.items() if _rounds_to(flat, start, ref)), None)
            if name is None:
                if not torch.any(flat.flat(start, flat.numel - start)):
                    break  # the padding at the end of a flat group
                return {}
            ref = waiting.pop(name)
            found[name] = MergedTensor(ref.shape, ((flat, start, ref.numel),))
            start += ref.numel
    return found


def _flats(optimizer: Mapping[str, Any]) -> Iterator[TensorRef]:
    for group in optimizer.get("fp32_groups") or ():
        yield from group
    yield from optimizer.get("fp32_groups_flat") or ()


def _rounds_to(flat: TensorRef, start: int, weight: TensorRef) -> bool:
    if start + weight.numel > flat.numel or not (flat.is_contiguous and weight.is_contiguous):
        return False
    probe = min(weight.numel, 64)  # most candidates differ at once
    return all(
        torch.equal(flat.flat(start, count).to(weight.dtype), weight.flat(0, count)) for count in (probe, weight.numel)
    )
