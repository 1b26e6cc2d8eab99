"""Mistakes that are told before a model is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zero._compat.lightning import build_optimizers, call_module_hook
from lightning_zero.engine.optimizers import unsupported_reason
from lightning_zero.engine.session import EngineSession
from lightning_zero.errors import ConfigError

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.utilities.types import LRSchedulerConfig

_ONE_OPTIMIZER = (
    "configure_optimizers returned {}, and an engine has one optimizer and at most one scheduler. "
    "Return one optimizer with several parameter groups."
)


def micro_batch_size(value: int | None) -> int | None:
    """A positive whole number or ``None``."""
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(f"micro_batch_size={value!r} is not a number of samples. Pass a whole number above 0.")
    return value


def _callbacks(trainer: pl.Trainer) -> list[Any]:
    callbacks: list[Any] = vars(trainer)["callbacks"]  # the Trainer declares it nowhere
    return callbacks


def callbacks(trainer: pl.Trainer) -> None:
    """Refuses callbacks that change weights or gradients behind ZeRO's back."""
    reasons = {
        "StochasticWeightAveraging": "it averages whole parameters, and ZeRO keeps shards",
        "WeightAveraging": "it averages whole parameters, and ZeRO keeps shards",
        "EMAWeightAveraging": "it averages whole parameters, and ZeRO keeps shards",
        "BaseFinetuning": "it adds parameter groups during training, and ZeRO's shards are laid out once",
        "GradientAccumulationScheduler": "it changes accumulate_grad_batches during training, which the config fixes",
        "LearningRateFinder": "it restores optimizer states that ZeRO keeps in shards",
        "BatchSizeFinder": "it changes the batch size during training, which the config fixes",
    }
    for callback in _callbacks(trainer):
        for base in type(callback).__mro__:
            if base.__name__ in reasons and base.__module__.startswith("lightning."):
                raise ConfigError(
                    f"{type(callback).__name__} does not work under ZeRO: {reasons[base.__name__]}. "
                    "Remove it from Trainer(callbacks=...)."
                )


def checkpoint_writer(config: Mapping[str, Any]) -> None:
    """Refuses a writer that goes on after a save has returned: nobody could tell when the checkpoint is whole."""
    writer = (config.get("checkpoint") or {}).get("writer") or {}
    if writer.get("decoupled"):
        raise ConfigError(
            "checkpoint.writer.decoupled: a checkpoint gets its name when it is whole, which this writer never tells. "
            "Leave it out."
        )


def equal_batches(trainer: pl.Trainer) -> None:
    """All ranks train on equally many batches, where that is known. Collective.

    Raises:
        ConfigError: They do not, on all ranks; the rank with the most would wait for the others for ever.
    """
    counts: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(counts, trainer.num_training_batches)
    if len(set(counts)) > 1:
        told = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts[:8]))
        raise ConfigError(
            f"The ranks have different numbers of training batches ({told}), and every backward pass needs all ranks. "
            f"Use limit_train_batches={int(min(counts))}, or a sampler that deals equally."
        )


def one_optimizer(optimizers: Sequence[Optimizer], module: Module) -> Optimizer:
    """The one optimizer of a ``fabric.setup``, which ZeRO can shard.

    Raises:
        ConfigError: Several, or one of a kind that cannot be sharded.
    """
    if len(optimizers) != 1:
        raise ConfigError(
            f"fabric.setup was given {len(optimizers)} optimizers for one {type(module).__name__}, and an engine has "
            "one. Give one optimizer with several parameter groups, or set each part up as a model of its own."
        )
    supported(optimizers[0])
    return optimizers[0]


def supported(optimizer: Optimizer) -> None:
    """Refuses an optimizer that ZeRO cannot shard."""
    reason = unsupported_reason(optimizer)
    if reason is not None:
        raise ConfigError(f"{type(optimizer).__name__} does not work under ZeRO: {reason}. Use AdamW, Adam or SGD.")


def one_swapping_model(config: Mapping[str, Any], others: Sequence[EngineSession]) -> None:
    """Refuses a second engine that swaps to NVMe: DeepSpeed deletes the first one's files when it starts."""
    zero = config["zero_optimization"]
    swaps = any((zero.get(section) or {}).get("device") == "nvme" for section in ("offload_optimizer", "offload_param"))
    if swaps and others:
        raise ConfigError(
            f"{type(others[0].module).__name__} swaps to NVMe already, and a second model would delete its files. Use "
            "offload to the CPU, or end the first with `fabric.strategy.release(model)`."
        )


def loss(tensor: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuses what an engine cannot run ``fabric.backward`` on.

    Raises:
        ConfigError: No scalar, one without a graph, or other arguments than ``retain_graph``.
    """
    other = [*(["gradient"] if args else []), *(name for name in kwargs if name != "retain_graph")]
    if other:
        raise ConfigError(
            f"fabric.backward({', '.join(other)}=...) has no meaning for DeepSpeed's engine. Leave it out; "
            "retain_graph= is possible."
        )
    if tensor.numel() != 1:
        raise ConfigError(
            f"fabric.backward was given a tensor of shape {tuple(tensor.shape)}, and DeepSpeed's engine needs one "
            "number. Reduce it, with `.mean()` say."
        )
    if not tensor.requires_grad:
        raise ConfigError(
            "fabric.backward was given a loss that depends on no parameter. Compute it from the model's output, "
            "outside of torch.no_grad()."
        )


def no_storage_options(options: Any) -> None:
    """Refuses what only a ``CheckpointIO`` could use."""
    if options is not None:
        raise ConfigError("storage_options are for a CheckpointIO, and DeepSpeed writes its shards itself. Omit them.")


def optimizers_from_code(module: pl.LightningModule) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """What ``configure_optimizers`` returns: one optimizer that ZeRO can shard, at most one scheduler.

    Raises:
        ConfigError: Anything else.
    """
    try:
        optimizers, schedulers = build_optimizers(module)
    except RuntimeError as refusal:  # Lightning's advice, manual optimization, would not help here
        if "multiple optimizers" not in str(refusal):
            raise
        raise ConfigError(_ONE_OPTIMIZER.format("several optimizers")) from None
    if len(optimizers) == 1 and not optimizers[0].param_groups:  # what Lightning puts in the place of None
        raise ConfigError(
            "configure_optimizers returned None, and the config has no `optimizer` section. "
            "Return an optimizer, or describe it in the config."
        )
    if len(optimizers) != 1 or len(schedulers) > 1:
        raise ConfigError(_ONE_OPTIMIZER.format(f"{len(optimizers)} optimizers and {len(schedulers)} schedulers"))
    supported(optimizers[0])
    return optimizers, schedulers


def no_optimizer_from_code(module: pl.LightningModule) -> None:
    """With an ``optimizer`` section in the config, ``configure_optimizers`` returns nothing."""
    returned = call_module_hook(module.trainer, "configure_optimizers", pl_module=module)
    if returned is not None:
        raise ConfigError(
            f"The config has an `optimizer` section and {type(module).__name__}.configure_optimizers returns one too. "
            "Remove the section, or let configure_optimizers return None and describe the scheduler in the config."
        )
