"""Optimizer states of a checkpoint in a live engine that shards them in another way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_zero._compat.deepspeed_masters import Flat, own_flats
from lightning_zero.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_NO_HYPER_PARAMETERS = ("params", "initial_lr")


class Cut(Protocol):
    """A tensor on disk, of which parts can be read."""

    def span(self, start: int, numel: int) -> Iterator[tuple[int, Tensor]]: ...


class SavedOptimizer(Protocol):
    """See :class:`lightning_zero.checkpoint.reshard.SavedOptimizer`."""

    @property
    def elements(self) -> Mapping[str, Mapping[str, Cut]]: ...

    @property
    def numbers(self) -> Mapping[str, Mapping[str, float]]: ...

    @property
    def groups(self) -> tuple[Mapping[str, Any], ...]: ...

    @property
    def steps(self) -> Mapping[str, int]: ...

    @property
    def loss_scaler(self) -> Mapping[str, float]: ...


def check_reshardable(engine: DeepSpeedEngine, saved: SavedOptimizer, *, where: str, weights_call: str) -> None:
    """Compares optimizers before anything is changed.

    Args:
        engine: A training engine.
        saved: The checkpoint's optimizer.
        where: The checkpoint, for the message.
        weights_call: The call that loads weights alone, for the message.

    Raises:
        CheckpointError: The engine's optimizer is of another kind, or its states cannot be set.
    """
    remedy = f"Start from its weights with `{weights_call}`."
    if own_flats(engine.optimizer) is None:
        raise CheckpointError(
            f"{where} was saved at another stage or by another number of ranks, and this engine's optimizer states "
            f"cannot be set part by part: they are whole, on NVMe, or in an optimizer that is not ZeRO's. {remedy}"
        )
    groups = engine.optimizer.optimizer.param_groups
    if len(groups) != len(saved.groups):
        raise CheckpointError(
            f"{where} has {len(saved.groups)} parameter groups, and this run's optimizer has {len(groups)}. "
            f"Make the same groups. {remedy}"
        )
    for here, there in zip(groups, saved.groups, strict=True):
        missing = [name for name in _hyper_parameters(here) if name not in there]
        if missing:
            raise CheckpointError(
                f"{where} is of an optimizer without {missing[0]}, and this run's {type(_base(engine)).__name__} has "
                f"one. Use the optimizer that was saved. {remedy}"
            )


def set_optimizer_state(engine: DeepSpeedEngine, module: Module, saved: SavedOptimizer) -> None:
    """Gives this rank its part of the states, and the groups' hyper-parameters and the counters.

    Args:
        engine: A training engine that :func:`check_reshardable` has passed.
        module: Its module.
        saved: The checkpoint's optimizer. Each tensor is read when its turn comes, and no more of it than this rank's.
    """
    optimizer = _base(engine)
    names = {parameter: name for name, parameter in module.named_parameters()}
    flats = own_flats(engine.optimizer)
    assert flats is not None
    for flat in flats:
        _set_elements(optimizer.state[flat.tensor], flat, names, saved)
        _set_numbers(optimizer, optimizer.state[flat.tensor], flat, names, saved)
    for here, there in zip(optimizer.param_groups, saved.groups, strict=True):
        here.update({name: there[name] for name in here if name in there and name != "params"})
    for name, count in saved.steps.items():
        setattr(engine, name, count)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    for name, value in saved.loss_scaler.items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)


def _set_elements(state: dict[str, Any], flat: Flat, names: Mapping[Parameter, str], saved: SavedOptimizer) -> None:
    of_spans = [saved.elements.get(names[parameter], {}) for parameter, *_ in flat.spans]
    for slot in dict.fromkeys(name for elements in of_spans for name in elements):
        target = state.get(slot)
        if not isinstance(target, Tensor) or target.shape != flat.tensor.shape:
            target = state[slot] = torch.zeros_like(flat.tensor, requires_grad=False)
        target.zero_()
        for elements, (_, position, start, numel) in zip(of_spans, flat.spans, strict=True):
            if slot in elements:
                for offset, values in elements[slot].span(start, numel):
                    target[position + offset : position + offset + values.numel()].copy_(values)


def _set_numbers(
    optimizer: Optimizer, state: dict[str, Any], flat: Flat, names: Mapping[Parameter, str], saved: SavedOptimizer
) -> None:
    for parameter, *_ in reversed(flat.spans):
        for name, number in saved.numbers.get(names[parameter], {}).items():
            # torch's optimizers count in tensors on the CPU, DeepSpeed's in Python's numbers.
            in_tensors = type(optimizer).__module__.startswith("torch.")
            state[name] = torch.tensor(float(number)) if in_tensors else _as_saved(number)


def _as_saved(number: float) -> float:
    return int(number) if float(number).is_integer() else number


def _hyper_parameters(group: Mapping[str, Any]) -> list[str]:
    """Names of the group's entries that make an optimizer what it is, rather than how it is computed."""
    return [
        name
        for name, value in group.items()
        if isinstance(value, (float, tuple, list)) and name not in _NO_HYPER_PARAMETERS
    ]


def _base(engine: DeepSpeedEngine) -> Optimizer:
    base: Optimizer = engine.optimizer.optimizer
    return base
