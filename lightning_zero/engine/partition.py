"""Parameters sharded over the ranks (stage 3): which are, and how they become whole again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module, ModuleDict, ModuleList, Parameter, init

from lightning_zero._compat.deepspeed import forget_partitioning, restore_parameter_dicts


def is_partitioned(parameter: Parameter) -> bool:
    """Whether stage 3 manages this parameter: outside a gather, each rank holds one part of it."""
    return hasattr(parameter, "ds_id")


def whole_parameters(module: Module) -> set[str]:
    """Names of the parameters that are whole on this rank."""
    return {name for name, parameter in module.named_parameters() if not is_partitioned(parameter)}


def numel(parameter: Parameter) -> int:
    """Number of elements of the whole parameter, however much of it this rank holds."""
    return int(parameter.ds_numel) if is_partitioned(parameter) else parameter.numel()  # type: ignore[attr-defined]


def whole_shape(tensor: torch.Tensor) -> torch.Size | None:
    """Shape of a sharded parameter when it is whole; ``None`` for any other tensor, which has its own."""
    return torch.Size(tensor.ds_shape) if is_partitioned(tensor) else None  # type: ignore[arg-type, attr-defined]


@contextmanager
def gathered(parameters: Sequence[Parameter], *, writer: int | None = None) -> Iterator[None]:
    """Sharded parameters are whole inside; whole ones stay as they are. Collective.

    Args:
        parameters: The parameters.
        writer: The rank whose values all ranks keep; ``None``: changes are dropped.
    """
    if not any(is_partitioned(parameter) for parameter in parameters):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=writer):
        yield


def restore_whole(module: Module, names: set[str] | None = None) -> None:
    """Makes parameters that an engine has partitioned ordinary whole ones again. Collective.

    Args:
        module: The module whose engine has ended.
        names: Parameters to restore, by name; others stay as they are. ``None``: all.
    """
    every = module.named_parameters()
    chosen = [p for name, p in every if (names is None or name in names) and is_partitioned(p)]
    if not chosen:
        return
    for parameter in chosen:
        with gathered([parameter]):
            whole = parameter.detach().clone()
        forget_partitioning(parameter)
        parameter.data = whole
    restore_parameter_dicts(module)


def shard_like_the_rest(module: Module) -> None:
    """Shards the whole parameters of a module as its sharded ones are, in their type, with rank 0's values. Collective.

    Args:
        module: A module built under ``zero.Init``; one without any sharded parameter stays whole.
    """
    parameters = list(module.parameters())
    whole = [parameter for parameter in parameters if not is_partitioned(parameter)]
    sharded = next((parameter for parameter in parameters if is_partitioned(parameter)), None)
    if whole and sharded is not None:
        for parameter in whole:
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(sharded.dtype)
        sharded.convert_to_zero_parameters(param_list=whole)  # type: ignore[attr-defined]


@contextmanager
def filled_whole() -> Iterator[None]:
    """Functions of ``torch.nn.init`` that are called inside on a sharded parameter fill the whole of it.

    They would fill this rank's empty tensor, without a word: an adapter that must begin at zero begins at random. To be
    called on all ranks, of which rank 0's values are kept.
    """
    originals = {name: fill for name, fill in vars(init).items() if name.endswith("_") and name[0] != "_"}
    for name, fill in originals.items():
        setattr(init, name, _filling_whole(fill))
    try:
        yield
    finally:
        for name, fill in originals.items():
            setattr(init, name, fill)


def _filling_whole(fill: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fill)
    def fill_whole(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not (isinstance(tensor, Parameter) and tensor.numel() < numel(tensor)):
            return fill(tensor, *args, **kwargs)
        with gathered([tensor], writer=0):
            return fill(tensor, *args, **kwargs)

    return fill_whole


def gather_experts_together(module: Module) -> None:
    """Has stage 3 gather a mixture of experts as one, before the engine starts.

    Parameters are gathered when their module is called. An expert that gets no token on some rank is not called there,
    while the other ranks wait for its part. DeepSpeed knows three classes of transformers by name; this knows them by
    what they hold, a list of modules named ``experts``.

    Args:
        module: The module to run.
    """
    from deepspeed.utils import set_z3_leaf_module

    for block in module.modules():
        experts = getattr(block, "experts", None)
        if isinstance(experts, (ModuleList, ModuleDict)) and len(experts) > 1:
            set_z3_leaf_module(block, True)
