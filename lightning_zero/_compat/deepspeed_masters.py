"""Where DeepSpeed's optimizers keep this rank's part of the fp32 weights (0.19.8).

The documented ``safe_get_full_fp32_param`` makes a weight whole on every rank, by communication; these are the flat
buffers that it reads, in which each rank finds its own part by itself. They are:

* stages 1 and 2 (``DeepSpeedZeroOptimizer``): ``round_robin_bit16_groups`` and ``round_robin_bit16_offsets`` say where
  each parameter begins in its group, which ``single_partition_of_fp32_groups`` holds one rank's share of;
* bf16 with fp32 accumulation (``BF16_Optimizer``): ``_hp_mapping`` on each parameter, in ``bf16_groups``;
* stage 3 (``DeepSpeedZeroOptimizer_Stage3``): ``grad_position`` says where each parameter's share lies in
  ``fp32_partitioned_groups_flat``, which may be on NVMe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

Part = Callable[[], tuple[int, Tensor]]
"""Gives the first element of a rank's part of a parameter, and the part's elements, flat; read at once."""


class Flat(NamedTuple):
    """A flat fp32 tensor of this rank, which the optimizer has its states for, and what lies in it.

    ``spans`` has a row for each parameter of the group: the parameter, where its elements begin in the flat tensor,
    which of its own elements is the first there, and how many there are.
    """

    tensor: Tensor
    spans: list[tuple[Parameter, int, int, int]]


def own_flats(optimizer: Any) -> list[Flat] | None:
    """This rank's flat fp32 tensors at stages 1 to 3; None for other optimizers, and where they are swapped to NVMe.

    Args:
        optimizer: ``engine.optimizer``.
    """
    if hasattr(optimizer, "round_robin_bit16_offsets"):
        return [_flat_of_group(optimizer, group) for group in range(len(optimizer.round_robin_bit16_groups))]
    if not hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return None
    groups = range(len(optimizer.fp16_groups))
    if any(optimizer._swappable_optimizer_subgroup(group) for group in groups):
        return None
    return [_flat_of_stage_3(optimizer, group) for group in groups]


def _flat_of_group(optimizer: Any, group: int) -> Flat:
    share = optimizer.single_partition_of_fp32_groups[group]
    begin = share.numel() * dist.get_rank(optimizer.real_dp_process_group[group])
    spans = []
    parameters, offsets = optimizer.round_robin_bit16_groups[group], optimizer.round_robin_bit16_offsets[group]
    for parameter, offset in zip(parameters, offsets, strict=True):
        low = max(offset, begin)
        high = max(low, min(offset + parameter.numel(), begin + share.numel()))
        spans.append((parameter, low - begin, low - offset, high - low))
    return Flat(share, spans)


def _flat_of_stage_3(optimizer: Any, group: int) -> Flat:
    spans = []
    for parameter in optimizer.fp16_groups[group]:
        _, position, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = parameter.partition_numel() * parameter.ds_zero_partition_rank
        spans.append((parameter, position, start, max(0, min(numel, parameter.ds_numel - start))))
    return Flat(optimizer.fp32_partitioned_groups_flat[group], spans)


def own_masters(optimizer: Any) -> dict[Parameter, Part]:
    """This rank's part of every fp32 weight that an engine's optimizer has spread over the ranks.

    Args:
        optimizer: ``engine.optimizer``.

    Returns:
        The same parameters on every rank; empty when nothing is spread.
    """
    if hasattr(optimizer, "round_robin_bit16_offsets"):
        return dict(_of_flat_groups(optimizer))
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return {p: _of_stage_3(optimizer, p) for group in optimizer.fp16_groups for p in group}
    if hasattr(optimizer, "fp32_groups_flat_partition"):
        return {p: _of_mapping(p) for group in optimizer.bf16_groups for p in group}
    return {}


def _of_flat_groups(optimizer: Any) -> Iterator[tuple[Parameter, Part]]:
    for group in range(len(optimizer.round_robin_bit16_groups)):
        share, spans = _flat_of_group(optimizer, group)
        for parameter, position, start, numel in spans:
            yield parameter, _fixed(start, share.detach()[position : position + numel])


def _of_stage_3(optimizer: Any, parameter: Any) -> Part:
    def part() -> tuple[int, Tensor]:
        from deepspeed.utils import safe_get_local_fp32_param

        group, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
        if optimizer._swappable_optimizer_subgroup(group):
            share = safe_get_local_fp32_param(parameter)
        else:
            share = optimizer.fp32_partitioned_groups_flat[group].detach().narrow(0, offset, numel)
        return own_range(parameter, share)

    return part


def own_range(parameter: Any, share: Tensor) -> tuple[int, Tensor]:
    """The first element of this rank's share of a parameter at stage 3, and the share without its padding."""
    start = parameter.partition_numel() * parameter.ds_zero_partition_rank
    left = max(0, parameter.ds_numel - start)
    return min(start, parameter.ds_numel), share.flatten()[:left]


def partition_in_memory(parameter: Any) -> Tensor | None:
    """This rank's share of a stage-3 parameter as forward sees it; None where it may be on NVMe or quantized.

    The answer has the same kind on every rank.
    """
    share: Tensor = parameter.ds_tensor
    return share.detach() if parameter.nvme_swapper is None and share.dtype == parameter.dtype else None


def _of_mapping(parameter: Any) -> Part:
    mapping = parameter._hp_mapping
    if mapping is None:
        return _fixed(0, parameter.detach().flatten()[:0])
    return _fixed(mapping.lp_fragment_address.start, mapping.hp_fragment.detach())


def _fixed(start: int, values: Tensor) -> Part:
    return lambda: (start, values)
