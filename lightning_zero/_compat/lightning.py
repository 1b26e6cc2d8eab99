"""Lightning's private names, each with what it is, why it is needed and where it was last seen (2.6.6)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout as default_timeout
from lightning.fabric.plugins.precision.deepspeed import DeepSpeedPrecision as FabricDeepSpeedPrecision
from lightning.fabric.strategies.deepspeed import _validate_device_index_selection as validate_device_indices
from lightning.fabric.utilities.imports import _IS_INTERACTIVE as IS_INTERACTIVE
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers as build_optimizers
from lightning.pytorch.plugins.precision.deepspeed import DeepSpeedPrecision
from lightning.pytorch.trainer.call import _call_lightning_module_hook as call_module_hook
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy

__all__ = [
    "IS_INTERACTIVE",
    "OVERRIDDEN",
    "DeepSpeedPrecision",
    "FabricDeepSpeedPrecision",
    "build_optimizers",
    "call_module_hook",
    "default_timeout",
    "discount_update",
    "is_overridden",
    "lightning_getattr",
    "lightning_hasattr",
    "loaders_passed_to_fit",
    "release_optimizers",
    "restore_loader_position",
    "training_loaders",
    "validate_device_indices",
]

OVERRIDDEN = {
    "lightning.pytorch.strategies.DeepSpeedStrategy": (
        "_configure_launcher",
        "config",
        "exclude_frozen_parameters",
        "load_full_weights",
        "zero_stage_3",
    ),
}
"""Names of parents that we set or override although they are not documented; the contract test reads this table."""


def discount_update(trainer: pl.Trainer) -> None:
    """Takes the update that is being made out of the loop's counters, for an update that overflow has skipped.

    ``trainer.global_step`` is the number of completed optimizer steps, which the loop counts after the step whatever
    came of it.
    """
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        progress = loop.automatic_optimization.optim_progress.optimizer.step
    else:
        progress = loop.manual_optimization.optim_step_progress
    for counter in (progress.total, progress.current):
        counter.ready -= 1
        counter.completed -= 1


def loaders_passed_to_fit(trainer: pl.Trainer) -> list[Any]:
    """The loaders given to ``trainer.fit``, one by one; empty when a hook is to make them."""
    source = trainer.fit_loop._data_source
    if source.name or source.instance is None:  # a name is that of the hook to call
        return []
    return _flatten(source.instance)


def training_loaders(trainer: pl.Trainer) -> list[Any]:
    """The training loaders, made by their hook if that has not been called yet."""
    trainer.fit_loop.setup_data()
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def restore_loader_position(trainer: pl.Trainer) -> None:
    """Lets a stateful loader go on where the checkpoint stopped, if it was made before the checkpoint was read.

    ``fit_loop.setup_data`` gives a loader its state once, when it makes the loader. Whoever asked for the batch size or
    the number of updates during setup has made it already, and the state would never arrive.
    """
    loop = trainer.fit_loop
    if loop.restarting and loop._data_fetcher is not None and loop._combined_loader_states_to_load:
        loop._load_combined_loader_states()
        iter(loop._data_fetcher)


def release_optimizers(strategy: Strategy) -> None:
    """Forgets the optimizers and schedulers of an ended run."""
    strategy._reset_optimizers_and_schedulers()


def _flatten(loaders: Any) -> list[Any]:
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    if isinstance(loaders, CombinedLoader):
        return list(loaders.flattened)
    if isinstance(loaders, (list, tuple, dict)) or not isinstance(loaders, Iterable):
        return list(CombinedLoader(loaders).flattened)
    return [loaders]
