"""From a resolved config and a module to a DeepSpeed engine, and back."""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zero._compat.deepspeed import (
    detach_engine,
    forget_shared_memory,
    misread_gradients,
    reset_once_a_step,
    suspended_init,
)
from lightning_zero._compat.deepspeed_init import casting_init
from lightning_zero.engine.accelerator import environment
from lightning_zero.engine.partition import gather_experts_together, is_partitioned, restore_whole
from lightning_zero.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# What DeepSpeed cannot do without, and what says nothing about an evaluation.
_EVALUATION_BATCH = {"train_micro_batch_size_per_gpu": 1}

_SIXTEEN_BITS = {"bf16": torch.bfloat16, "fp16": torch.float16}  # sections of a config


def join_process_group(backend: str, local_rank: int, timeout: timedelta | None) -> None:
    """Puts DeepSpeed's communication layer on top of the process group that exists already."""
    import deepspeed

    # DeepSpeed's collectives go by names that torch is renaming; the user can do nothing about it, and would be told
    # at every update.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    with environment({"LOCAL_RANK": str(local_rank)}):
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)
    forget_shared_memory()


def set_log_level(level: int) -> None:
    """Log level of DeepSpeed's own logger, as in :mod:`logging`."""
    logging.getLogger("DeepSpeed").setLevel(level)


@contextmanager
def sharded_init(config: Mapping[str, Any], *, enabled: bool, local_rank: int) -> Iterator[None]:
    """Parameters made inside are partitioned at once (``deepspeed.zero.Init``); without effect below stage 3.

    They get the config's 16-bit type; buffers and other tensors keep theirs.
    """
    if not enabled:
        yield
        return
    visible = {**_EVALUATION_BATCH, **copy.deepcopy(dict(config))}
    with environment({"LOCAL_RANK": str(local_rank)}), casting_init(visible):
        yield


@contextmanager
def whole_init() -> Iterator[None]:
    """Inside :func:`sharded_init`, parameters made in this context are whole after all; elsewhere nothing happens."""
    if "deepspeed" not in sys.modules:
        yield
        return
    with suspended_init():
        yield


def start_engine(
    module: Module,
    config: Mapping[str, Any],
    *,
    device: torch.device,
    local_rank: int,
    optimizer: Optimizer | None = None,
    evaluate: bool = False,
) -> DeepSpeedEngine:
    """An engine around ``module``.

    Args:
        module: The module to train or evaluate; its parameters become views of, or shards in, the engine's buffers.
        config: A resolved config: no ``"auto"`` in it. Not edited.
        device: This rank's device.
        local_rank: This rank's number on its host.
        optimizer: The optimizer from code; ``None``: the one of the config's ``optimizer`` section.
        evaluate: No optimizer at all, so that no optimizer state is allocated.

    Returns:
        The engine.

    Raises:
        ConfigError: DeepSpeed would read gradients wrong from NVMe.
    """
    import deepspeed

    args = argparse.Namespace(device_rank=device.index) if device.type == "cuda" else None
    parameters = [] if evaluate else [p for p in module.parameters() if p.requires_grad]
    if config.get("zero_optimization", {}).get("stage") == 3:
        gather_experts_together(module)
        _cast_late_parameters(module, config)
    with environment({"LOCAL_RANK": str(local_rank)}):
        engine, *_ = deepspeed.initialize(
            args=args,
            model=module,
            optimizer=optimizer,
            model_parameters=parameters,
            config=copy.deepcopy(dict(config)),
            dist_init_required=False,
        )
    _refuse_misread_gradients(engine)
    reset_once_a_step(engine)
    _configure_activation_checkpointing(config)
    return engine


def release_engine(engine: DeepSpeedEngine, *, whole: set[str]) -> None:
    """Ends an engine: its hooks leave the module and its buffers can be freed.

    Args:
        engine: The engine to end.
        whole: Names of the parameters that existed whole on every rank before the engine partitioned them;
            those are made whole again.
    """
    module = engine.module
    engine.destroy()
    detach_engine(engine)
    restore_whole(module, whole)


def _cast_late_parameters(module: Module, config: Mapping[str, Any]) -> None:
    """Whole parameters beside sharded ones get the config's type: the engine takes ``zero.Init`` to have seen to it."""
    enabled = [dtype for key, dtype in _SIXTEEN_BITS.items() if config.get(key, {}).get("enabled") is True]
    parameters = list(module.parameters())
    if enabled and any(is_partitioned(parameter) for parameter in parameters):
        for parameter in parameters:
            if parameter.is_floating_point() and not is_partitioned(parameter):
                parameter.data = parameter.data.to(enabled[0])


def _refuse_misread_gradients(engine: DeepSpeedEngine) -> None:
    names = misread_gradients(engine)
    if not names:
        return
    release_engine(engine, whole=set())
    raise ConfigError(
        f"offload_optimizer='nvme': DeepSpeed would read the gradients of {len(names)} parameters wrong, {names[0]} "
        "first, since their shards do not start at a whole disk block. Use offload_optimizer='cpu', or parameter sizes "
        "that are multiples of 128 times the number of processes."
    )


def _configure_activation_checkpointing(config: Mapping[str, Any]) -> None:
    section = config.get("activation_checkpointing")
    if not section:
        return
    import deepspeed

    deepspeed.checkpointing.configure(
        mpu_=None,
        partition_activations=section.get("partition_activations"),
        contiguous_checkpointing=section.get("contiguous_memory_optimization"),
        num_checkpoints=section.get("number_checkpoints"),
        checkpoint_in_cpu=section.get("cpu_checkpointing"),
        synchronize=section.get("synchronize_checkpoint_boundary"),
        profile=section.get("profile"),
    )
