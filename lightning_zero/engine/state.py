"""The state of an engine and its module: written to shards, read from shards, or set from whole weights."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_zero._compat.deepspeed import end_failed_save, recording_writer, unknown_swap_files
from lightning_zero.engine.partition import gathered, is_partitioned
from lightning_zero.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_EXTRA_STATE = "_extra_state"


# Shards


def save_shards(
    engine: DeepSpeedEngine,
    folder: Path,
    tag: str,
    client_state: Mapping[str, Any],
    *,
    exclude_frozen: bool,
) -> str | None:
    """Writes this rank's shards. Collective; a rank that cannot write stays in step with the others.

    Args:
        engine: The engine.
        folder: The folder in which the tag's folder is made.
        tag: The tag.
        client_state: Lightning's part of the checkpoint.
        exclude_frozen: Leave frozen parameters out.

    Returns:
        Why this rank could not write, or ``None``.
    """
    with recording_writer(engine) as failures:
        try:
            engine.save_checkpoint(
                str(folder),
                tag=tag,
                client_state=dict(client_state),
                save_latest=False,
                exclude_frozen_parameters=exclude_frozen,
            )
        except OSError as failure:
            failures.append(failure)
            end_failed_save(engine)
    if not failures:
        return None
    key = _unpicklable(client_state)
    if key is not None:
        return f"the entry {key!r} cannot be pickled ({failures[0]}); remove it from the hyper-parameters or the state"
    return str(failures[0]) or type(failures[0]).__name__


def load_shards(engine: DeepSpeedEngine, folder: Path, tag: str) -> dict[str, Any]:
    """Loads weights, masters and optimizer states from the shards that as many ranks have written. Collective.

    Args:
        engine: A training engine of the same stage.
        folder: The checkpoint's folder.
        tag: Its tag.

    Returns:
        Lightning's part of the checkpoint.

    Raises:
        CheckpointError: Its swap files are of parameters with other numbers than the engine's.
    """
    names = unknown_swap_files(engine, folder / tag)
    if all_errors(names[0] if names else None):
        raise CheckpointError(
            f"{folder} was saved with NVMe offload by a process whose parameters had other numbers, which DeepSpeed "
            "gives in the order in which a process makes them. Resume in a new process, before any other model is made."
        )
    _, client_state = engine.load_checkpoint(
        str(folder), tag=tag, load_module_strict=False, load_lr_scheduler_states=False
    )
    state: dict[str, Any] = client_state
    return state


def all_errors(error: str | None) -> list[tuple[int, str]]:
    """Every rank's error, if any, on all ranks. Collective.

    Args:
        error: This rank's.

    Returns:
        Pairs of rank and error.
    """
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return [(rank, text) for rank, text in enumerate(errors) if text is not None]


# Random numbers


def rng_states() -> list[dict[str, Any]]:
    """The random-number states of all ranks, by rank. Collective."""
    own: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state()
    numpy = _numpy()
    if numpy is not None:
        own["numpy"] = numpy.random.get_state()
    states: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(states, own)
    return states


def set_rng_state(states: Sequence[Mapping[str, Any]]) -> None:
    """Sets this rank's random-number states, if as many ranks had saved them."""
    if len(states) != dist.get_world_size():
        return
    own = states[dist.get_rank()]
    torch.set_rng_state(own["torch"])
    random.setstate(own["python"])
    if "cuda" in own and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda"])
    numpy = _numpy()
    if "numpy" in own and numpy is not None:
        numpy.random.set_state(own["numpy"])


# Whole weights


def tensor_shapes(module: Module) -> dict[str, tuple[int, ...]]:
    """Names and whole shapes of what ``module.state_dict()`` holds as tensors, in its order."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            shapes[name] = tuple(getattr(parameters.get(name), "ds_shape", value.shape))
    return shapes


def check_weights(
    module: Module,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    strict: bool,
    where: str,
    missing_frozen: bool = False,
) -> None:
    """Compares names and shapes before anything is changed.

    Args:
        module: What is to be loaded into.
        shapes: What there is to load.
        strict: Whether names must be equal; shapes of equal names always must.
        where: The checkpoint, for the message.
        missing_frozen: Whether frozen parameters may be missing.

    Raises:
        CheckpointError: Names missing, unexpected and mismatched entries.
    """
    wanted = tensor_shapes(module)
    frozen = {n for n, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    problems = {
        "of another shape": [
            f"{name} ({_times(shapes[name])} instead of {_times(shape)})"
            for name, shape in wanted.items()
            if name in shapes and tuple(shapes[name]) != shape
        ]
    }
    if strict:
        problems["missing"] = [n for n in wanted if n not in shapes and not (missing_frozen and n in frozen)]
        extra = {n for n in shapes if n not in wanted and not n.endswith(_EXTRA_STATE)}
        problems["unexpected"] = sorted(extra)
    told = [f"{_some(names)} {kind}" for kind, names in problems.items() if names]
    if told:
        remedy = "Give the model that was saved."
        if not problems["of another shape"]:  # which no flag lets through
            remedy = (
                "Give the model that was saved, or let names differ: strict_loading = False on a LightningModule, "
                "strict=False in a call."
            )
        raise CheckpointError(f"{where} does not fit {type(module).__name__}: {'; '.join(told)}. {remedy}")


def set_weights(module: Module, weights: Mapping[str, Any], *, masters: Mapping[Parameter, Tensor]) -> None:
    """Sets parameters, their fp32 masters, and buffers from whole tensors, one at a time. Collective at stage 3.

    Args:
        module: A module, with or without an engine around it; its names and shapes have been checked.
        weights: Whole tensors by name; each is read when its turn comes.
        masters: fp32 weights that an engine keeps whole, as at stage 0 in 16 bits; shards are found by themselves.
    """
    for name, parameter in module.named_parameters():
        if name in weights:
            value = weights[name]
            _set_parameter(parameter, value)
            if parameter in masters:
                masters[parameter].data.copy_(value)
    buffers = dict(module.named_buffers(remove_duplicate=False))
    for name in module.state_dict(keep_vars=True):
        if name in buffers and name in weights:
            buffers[name].data.copy_(weights[name])
        elif name.endswith(_EXTRA_STATE) and name in weights:
            module.get_submodule(name[: -len(_EXTRA_STATE)].rstrip(".")).set_extra_state(weights[name])


def whole_weight(parameter: Parameter, masters: Mapping[Parameter, Tensor]) -> Tensor:
    """A whole parameter on the CPU: its fp32 master where an engine has one. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    if parameter in masters:
        return masters[parameter].detach().to("cpu", copy=True)
    if parameter.requires_grad and (hasattr(parameter, "_z3_optimizer") or hasattr(parameter, "_hp_mapping")):
        master: Tensor = safe_get_full_fp32_param(parameter)
        return master.view(getattr(parameter, "ds_shape", parameter.shape)).cpu()
    with gathered([parameter]):
        return parameter.detach().to("cpu", copy=True)


def whole_dtype(parameter: Parameter, masters: Mapping[Parameter, Tensor]) -> torch.dtype:
    """The type that :func:`whole_weight` returns."""
    if parameter in masters:
        return masters[parameter].dtype
    mastered = parameter.requires_grad and (hasattr(parameter, "_z3_optimizer") or hasattr(parameter, "_hp_mapping"))
    return torch.float32 if mastered else parameter.dtype


def _set_parameter(parameter: Parameter, value: Tensor) -> None:
    with torch.no_grad(), gathered([parameter], writer=0):
        if not is_partitioned(parameter) or dist.get_rank() == 0:
            parameter.data.copy_(value)
    if not parameter.requires_grad:
        return
    if hasattr(parameter, "_z3_optimizer"):
        _set_partition_of_master(parameter, value)
    elif hasattr(parameter, "_hp_mapping"):
        from deepspeed.utils import safe_set_full_fp32_param

        safe_set_full_fp32_param(parameter, value.float())


def _set_partition_of_master(parameter: Any, value: Tensor) -> None:
    # safe_set_full_fp32_param reads past the end of a tensor whose size the ranks do not divide.
    from deepspeed.utils import safe_set_local_fp32_param

    size = parameter.partition_numel()
    start = size * parameter.ds_zero_partition_rank
    part = torch.zeros(size)
    own = value.flatten()[start : start + size]
    part[: own.numel()].copy_(own)
    safe_set_local_fp32_param(parameter, part)


def _unpicklable(state: Mapping[str, Any], prefix: str = "") -> str | None:
    for key, value in state.items():
        try:
            pickle.dumps(value)
        except (pickle.PicklingError, TypeError, AttributeError):
            inner = _unpicklable(value, f"{prefix}{key}.") if isinstance(value, Mapping) else None
            return inner or f"{prefix}{key}"
    return None


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _numpy() -> Any:
    return sys.modules.get("numpy")  # a run without it has no such state
