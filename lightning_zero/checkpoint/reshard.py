"""Optimizer states of a checkpoint, by parameter, for a run that shards them in another way than the one that saved.

At stages 1 to 3 the states that have an element for each one of a parameter, such as Adam's moments, lie in flat
partitions cut like the fp32 weights (see :mod:`~lightning_zero.checkpoint.merge`); the others, such as the number of
steps, stand once for each group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_zero.checkpoint.layout import CheckpointLocation
from lightning_zero.checkpoint.merge import MergedTensor, lay_out
from lightning_zero.checkpoint.shards import TensorRef
from lightning_zero.checkpoint.states import SavedStates, open_states
from lightning_zero.errors import CheckpointError

__all__ = ["SavedOptimizer", "saved_optimizer"]

_BASE = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}


@dataclass(frozen=True)
class SavedOptimizer:
    """The optimizer of the run that saved a checkpoint.

    Args:
        elements: States with an element for each one of a parameter: parameter's name -> state's name -> tensor. Of
            parameters that had none yet, nothing.
        numbers: The others: parameter's name -> state's name -> number.
        groups: Hyper-parameters of each parameter group, without the parameters.
        steps: The engine's counters: ``global_steps``, ``global_samples``, ``skipped_steps``.
        loss_scaler: The numbers of fp16's loss scaler.
    """

    elements: Mapping[str, Mapping[str, MergedTensor]]
    numbers: Mapping[str, Mapping[str, float]]
    groups: tuple[Mapping[str, Any], ...]
    steps: Mapping[str, int]
    loss_scaler: Mapping[str, float]


def saved_optimizer(location: CheckpointLocation) -> SavedOptimizer:
    """Find out where the optimizer states of a sharded checkpoint lie. Reads no tensor data but the step counts.

    Args:
        location: A sharded checkpoint.

    Returns:
        The optimizer.

    Raises:
        CheckpointError: The states are not sharded, lie on NVMe, or are damaged.
    """
    states = open_states(location)
    what = _why_not(states)
    if what is not None:
        raise CheckpointError(
            f"{location.folder} {what}, so its optimizer states go to as many processes at the same stage alone. "
            "Resume so, or start from its weights with `trainer.strategy.load_weights(path)`."
        )
    base: list[Mapping[str, Any]] = [state[_BASE[states.stage]] for state in states.optim]
    elements: dict[str, dict[str, MergedTensor]] = {}
    numbers: dict[str, dict[str, float]] = {}
    by_rank: list[Sequence[Mapping[str, Any]]] = [_by_group(states, state) for state in base]
    for slot in dict.fromkeys(name for group in by_rank[0] for name, value in group.items() if _is_flat(value)):
        partitions = [[of_rank[group].get(slot) for of_rank in by_rank] for group in range(len(by_rank[0]))]
        for name, tensor in _laid_out(states, partitions).items():
            elements.setdefault(name, {})[slot] = tensor
    for names, group in zip(states.model[0]["param_shapes"], by_rank[0], strict=True):
        found = {key: _number(value) for key, value in group.items() if not _is_flat(value)}
        for name in names:
            numbers[name] = {key: number for key, number in found.items() if number is not None}
    groups = tuple({key: value for key, value in group.items() if key != "params"} for group in base[0]["param_groups"])
    first = states.model[0]
    steps = {key: int(first[key]) for key in ("global_steps", "global_samples", "skipped_steps") if key in first}
    scaler = getattr(states.optim[0].get("loss_scaler"), "state", None) or {}
    scales = {key: value for key, value in scaler.items() if isinstance(value, (int, float))}
    return SavedOptimizer(elements, numbers, groups, steps, scales)


def _why_not(states: SavedStates) -> str | None:
    if states.stage == 0:
        return "was saved at stage 0"
    if (states.location.folder / "offloaded_tensors").is_dir():
        return "was saved with NVMe offload"
    if any(not isinstance(state.get(_BASE[states.stage]), Mapping) for state in states.optim):
        return 'was saved with "elastic_checkpoint": true'
    config = states.model[0].get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    if states.stage < 3 and isinstance(zero, Mapping) and zero.get("round_robin_gradients"):
        return "was saved with round_robin_gradients"
    return None


def _by_group(states: SavedStates, base: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A rank's states of each flat group; an optimizer numbers its tensors, which are the flat groups, in order."""
    return [base["state"].get(group, {}) for group in range(len(states.model[0]["param_shapes"]))]


def _laid_out(states: SavedStates, partitions: list[list[Any]]) -> dict[str, MergedTensor]:
    if any(part is None for group in partitions for part in group):
        raise CheckpointError(
            f"{states.location.folder}: some groups or ranks have optimizer states that others have not. "
            "Resume at the same stage with as many processes."
        )
    return lay_out(states, partitions)


def _is_flat(value: Any) -> bool:
    return isinstance(value, TensorRef) and len(value.shape) == 1


def _number(value: Any) -> float | None:
    if isinstance(value, TensorRef):
        return float(value.load().item()) if value.numel == 1 else None
    return value if isinstance(value, (int, float)) else None
