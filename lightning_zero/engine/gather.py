"""Live weights, of which every rank gives the part that it holds anyway, so that none of them need be made whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_zero._compat.deepspeed import unsharded_masters
from lightning_zero._compat.deepspeed_masters import own_masters, own_range, partition_in_memory
from lightning_zero.engine.partition import gathered, is_partitioned

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class LiveWeights:
    """What ``module.state_dict()`` holds as tensors, whole or spread over the ranks.

    Args:
        module: A module, or a part of one.
        engine: The engine that trains it; ``None``: none does, and the weights are those that forward sees.
        exclude_frozen: Leave frozen parameters out.
    """

    def __init__(self, module: Module, engine: DeepSpeedEngine | None, *, exclude_frozen: bool = False) -> None:
        self._trained = engine is not None
        self._spread = {} if engine is None else own_masters(engine.optimizer)
        self._copied = {} if engine is None else unsharded_masters(engine)
        self._has_masters = bool(self._spread or self._copied)
        self._tensors: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        """Each later name of a tied weight, with the first one."""
        self.left_out: list[str] = []
        """Names of the frozen parameters that were excluded."""
        self._read(module, exclude_frozen)

    def _read(self, module: Module, exclude_frozen: bool) -> None:
        parameters = dict(module.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            tensor = parameters.get(name, value)
            if not isinstance(tensor, Tensor):
                continue  # extra state
            if exclude_frozen and name in parameters and not tensor.requires_grad:
                self.left_out.append(name)
                continue
            owner = first.setdefault(id(tensor), name)
            if owner == name:
                self._tensors[name] = tensor
            else:
                self.aliases[name] = owner

    @property
    def names(self) -> list[str]:
        """First names, in the order of the state dict."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape."""
        tensor = self._tensors[name]
        return tuple(getattr(tensor, "ds_shape", tensor.shape))

    def exported_dtype(self, name: str, asked: torch.dtype | None) -> torch.dtype:
        """One floating type throughout: the one asked for, else fp32 beside fp32 masters, else each tensor's own.

        Args:
            name: A first name.
            asked: What the user asked for.
        """
        own = self._tensors[name].dtype
        if not own.is_floating_point:
            return own
        if asked is not None:
            return asked
        return torch.float32 if self._has_masters and own.itemsize < 4 else own

    def own_part(self, name: str) -> tuple[int, Tensor]:
        """This rank's part; those of all ranks make up the whole.

        May be collective at stage 3, so that all ranks ask for all names in order.

        Args:
            name: A first name.

        Returns:
            The first element's position in the whole tensor, and the elements, flat and possibly none. fp32 weights of
            the optimizer where it has them.
        """
        tensor = self._tensors[name]
        if not isinstance(tensor, Parameter):
            return _of_rank_zero(tensor)  # buffers may differ, and a checkpoint holds rank 0's
        if tensor in self._spread:
            return self._spread[tensor]()
        if is_partitioned(tensor):
            return _own_partition(tensor)
        whole = self._copied.get(tensor, tensor)
        return _equal_share(whole) if self._trained else _of_rank_zero(whole)


def _own_partition(parameter: Parameter) -> tuple[int, Tensor]:
    share = partition_in_memory(parameter)
    if share is not None:
        return own_range(parameter, share)
    with gathered([parameter]):
        start, own = _equal_share(parameter)
        return start, own.clone()


def _equal_share(whole: Tensor) -> tuple[int, Tensor]:
    """A part of what an engine holds whole, and the same, on every rank."""
    rank, ranks, numel = dist.get_rank(), dist.get_world_size(), whole.numel()
    start, end = numel * rank // ranks, numel * (rank + 1) // ranks
    return start, whole.detach().flatten()[start:end]


def _of_rank_zero(whole: Tensor) -> tuple[int, Tensor]:
    flat = whole.detach().flatten()
    return 0, flat if dist.get_rank() == 0 else flat[:0]
