"""What the Trainer's strategy and Fabric's both do on the way to an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zero._compat import lightning as _lightning
from lightning_zero.engine import ops
from lightning_zero.engine.initialize import join_process_group, sharded_init, whole_init
from lightning_zero.engine.partition import (
    filled_whole,
    gathered,
    numel,
    restore_whole,
    shard_like_the_rest,
    whole_parameters,
    whole_shape,
)
from lightning_zero.engine.session import EngineSession, end_session
from lightning_zero.engine.swap_folder import claim_swap_folders, refuse_too_little_room
from lightning_zero.errors import ConfigError
from lightning_zero.integrations.peft import adapted_whole
from lightning_zero.integrations.transformers import (
    Sharding,
    Zero3Marker,
    built_by_transformers,
    no_marker,
    refuse_empty_saves,
)


def build_ops(
    config: Mapping[str, Any], *, device: torch.device, devices: Sequence[torch.device] | None, local_rank: int
) -> None:
    """Builds what DeepSpeed compiles at first use, before processes wait for each other.

    Args:
        config: A resolved config.
        device: This rank's device.
        devices: Those of this host, which DeepSpeed wants counted from zero.
        local_rank: This rank's number on its host.
    """
    if device.type == "cuda" and devices is not None:
        _lightning.validate_device_indices(list(devices))
    ops.build_ops(ops.required_ops(config, device.type), local_rank=local_rank)


def join_ranks(config: Mapping[str, Any], *, backend: str, local_rank: int, timeout: timedelta | None) -> None:
    """Puts DeepSpeed on the process group that Lightning has made. Collective.

    Args:
        config: A resolved config.
        backend: ``gloo`` or ``nccl``.
        local_rank: This rank's number on its host.
        timeout: Longest wait of a collective.
    """
    join_process_group(backend, local_rank, timeout)
    claim_swap_folders(config)


def needs_launcher(processes: int) -> bool:
    """Whether processes are to be started, or were by somebody.

    Raises:
        ConfigError: They are, in a notebook, where that cannot be done.
    """
    if not _lightning.IS_INTERACTIVE:
        return True
    # One process needs no launcher, and Lightning's is refused in notebooks.
    if processes > 1:
        raise ConfigError(
            f"A notebook cannot start the {processes} processes of this run. Write a script, or use devices=1."
        )
    return False


@contextmanager
def built_sharded(config: Mapping[str, Any], *, local_rank: int) -> Iterator[None]:
    """Models built inside are sharded at birth at stage 3, with right initial weights; below, nothing happens.

    Args:
        config: A resolved config.
        local_rank: This rank's number on its host.
    """
    if not is_stage_3(config):
        yield
        return
    sharding = Sharding(
        gather=partial(gathered, writer=0),
        writer=torch.distributed.get_rank() == 0,
        whole_shape=whole_shape,
        make_whole=restore_whole,
        shard=shard_like_the_rest,
        built_whole=built_whole,
    )
    with (
        built_by_transformers(Zero3Marker(config), sharding),
        adapted_whole(sharding, suspended=whole_init),
        filled_whole(),
        sharded_init(config, enabled=True, local_rank=local_rank),
    ):
        yield


@contextmanager
def built_whole() -> Iterator[None]:
    """Models built inside are whole, also inside :func:`built_sharded`."""
    with whole_init(), no_marker():
        yield


def is_stage_3(config: Mapping[str, Any]) -> bool:
    """Whether a resolved config shards parameters."""
    return bool(config["zero_optimization"]["stage"] == 3)


def start_training(
    module: Module,
    config: Mapping[str, Any],
    *,
    device: torch.device,
    local_rank: int,
    optimizer: Optimizer | None,
    clipping: float,
) -> EngineSession:
    """An engine that trains a module; another one around it is ended first. Collective.

    Args:
        module: The module.
        config: A resolved config.
        device: This rank's device.
        local_rank: This rank's number on its host.
        optimizer: The optimizer from code; ``None``: the config describes it.
        clipping: Largest global gradient norm of an update that nobody clips; 0 does not clip.
    """
    if is_stage_3(config):
        refuse_empty_saves(module)
        refuse_too_little_room(module, config)
    session = EngineSession(
        module, config, device=device, local_rank=local_rank, optimizer=optimizer, clipping=clipping
    )
    if session.swapped:
        rank_zero_info(
            f"{type(optimizer).__name__} is replaced by DeepSpeed's CPU Adam over the same parameter groups."
        )
    return session


def start_evaluation(
    module: Module, config: Mapping[str, Any], *, device: torch.device, local_rank: int
) -> EngineSession:
    """An engine without an optimizer, which gathers the parameters that stage 3 has sharded. Collective.

    Args:
        module: The module.
        config: A config resolved for an evaluation, at stage 3.
        device: This rank's device.
        local_rank: This rank's number on its host.
    """
    refuse_empty_saves(module)
    return EngineSession(module, config, device=device, local_rank=local_rank, evaluate=True)


def settle_parameters(module: Module, config: Mapping[str, Any], *, remedy: str) -> None:
    """Before a training: below stage 3 parameters must be whole; at stage 3 they had better not be. Collective.

    Args:
        module: The module to train.
        config: A resolved config.
        remedy: How a model is built sharded, for the warning.
    """
    if not is_stage_3(config):
        make_whole(module)
        return
    names = whole_parameters(module)
    if names:
        whole = sum(numel(p) for name, p in module.named_parameters() if name in names)
        rank_zero_warn(
            f"{whole:,} parameters of {type(module).__name__} exist whole on every rank before stage 3 starts, which "
            f"saves no memory while the model is built. {remedy}"
        )


def settle_for_evaluation(module: Module, config: Mapping[str, Any]) -> None:
    """Makes a model ready to be evaluated without an engine, below stage 3: rank 0's weights, in the run's type.

    Collective. The weights stay in that type; buffers keep their own, as with an engine.

    Args:
        module: The model, on its device.
        config: A resolved config.
    """
    make_whole(module)
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}
    dtype = next((kind for name, kind in dtypes.items() if config.get(name, {}).get("enabled") is True), None)
    for parameter in module.parameters():
        if dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for tensor in (*module.parameters(), *module.buffers()):
        torch.distributed.broadcast(tensor.data, 0)


def make_whole(module: Module) -> None:
    """Makes parameters that an earlier stage-3 run has sharded whole, for a run below stage 3. Collective."""
    if len(whole_parameters(module)) < len(list(module.parameters())):
        end_session(module)
        restore_whole(module)
