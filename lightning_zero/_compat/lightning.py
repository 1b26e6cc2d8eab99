"""Lightning's private names, each with what it is, why it is needed and where it was last seen (2.6.6)."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout as default_timeout
from lightning.fabric.strategies.deepspeed import _validate_device_index_selection as validate_device_indices
from lightning.fabric.utilities.imports import _IS_INTERACTIVE as IS_INTERACTIVE
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers as build_optimizers
from lightning.pytorch.core.saving import _load_state as build_from_checkpoint
from lightning.pytorch.plugins.precision.deepspeed import DeepSpeedPrecision
from lightning.pytorch.trainer.call import _call_lightning_module_hook as call_module_hook
from lightning.pytorch.utilities.model_helpers import is_overridden

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy

__all__ = [
    "IS_INTERACTIVE",
    "OVERRIDDEN",
    "DeepSpeedPrecision",
    "build_from_checkpoint",
    "build_optimizers",
    "call_module_hook",
    "default_timeout",
    "discount_update",
    "draw_as_a_new_iterator",
    "epoch_has_ended",
    "handlers_before_run",
    "hpc_save_path",
    "is_overridden",
    "loaders_are_to_be_made",
    "loaders_from_hook",
    "loaders_passed_to_fit",
    "logs_this_batch",
    "release_optimizers",
    "remake_loaders",
    "save_and_requeue",
    "stop_as_terminated",
    "validate_device_indices",
]

OVERRIDDEN = {
    "lightning.fabric.strategies.DeepSpeedStrategy": (
        "_backward_sync_control",
        "_configure_launcher",
        "_setup_distributed",
        "exclude_frozen_parameters",
        "zero_stage_3",
    ),
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
    return [] if source.instance is None or source.is_module() else _flatten(source.instance)


def loaders_from_hook(trainer: pl.Trainer) -> list[Any]:
    """The training loaders that a hook makes, one by one, made now if that has not been done yet.

    Empty when the loaders were given to ``trainer.fit``, where they can be looked at without being made.
    """
    loop = trainer.fit_loop
    if not loop._data_source.is_module():
        return []
    loop.setup_data()
    return [] if loop._combined_loader is None else list(loop._combined_loader.flattened)


def logs_this_batch(trainer: pl.Trainer) -> bool:
    """Whether the loggers are written once this batch has made its update; the count of steps is the connector's."""
    return bool(trainer._logger_connector.should_update_logs)


def remake_loaders(trainer: pl.Trainer, *, made_early: bool) -> None:
    """Lets Lightning make the training loaders again when a checkpoint was read after they had been made.

    ``fit_loop.setup_data`` makes them once, and gives a stateful loader its position when it makes it. Whoever asked
    for the batch size or the number of updates during setup has made them before there was a position; and a hook may
    look at what the checkpoint has restored, such as a datamodule's count of samples. Called before the first batch of
    a resumed run, where the loop asks for its loaders once more.

    Args:
        trainer: The Trainer, fitting.
        made_early: Whether the loaders existed before the checkpoint was read.
    """
    loop = trainer.fit_loop
    from_hook = loop._data_source.is_module()
    if not loop.restarting or not (loop._combined_loader_states_to_load or (made_early and from_hook)):
        return
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
        loop._data_fetcher = None
    loop._combined_loader = None


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


def epoch_has_ended(trainer: pl.Trainer) -> bool:
    """Whether the last batch of the epoch has been trained on, so that the next one begins with a new iterator."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def loaders_are_to_be_made(trainer: pl.Trainer) -> bool:
    """Whether the loop will make its loaders before the next batch."""
    return trainer.fit_loop._data_fetcher is None


def draw_as_a_new_iterator(trainer: pl.Trainer) -> None:
    """Takes the random numbers that an uninterrupted run takes when it makes the next epoch's iterator.

    A resumed run has made that iterator before the random-number states came back. Loaders that keep a state of their
    own are left alone: a second iterator would not go on where they stopped.
    """
    loop = trainer.fit_loop
    loaders = [] if loop._combined_loader is None else loop._combined_loader.flattened
    if loop._data_fetcher is not None and not any(hasattr(loader, "load_state_dict") for loader in loaders):
        iter(loop._data_fetcher)


def handlers_before_run(trainer: pl.Trainer) -> dict[int, Any]:
    """The signal handlers that were set when the run began, before Lightning put its own in their place."""
    return dict(trainer._signal_connector._original_handlers)


def hpc_save_path(trainer: pl.Trainer) -> str:
    """Where a run that SLURM starts again looks for its checkpoint."""
    return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))


def save_and_requeue(trainer: pl.Trainer) -> None:
    """Saves a checkpoint for a run that SLURM is to start again, and asks SLURM to do so. Collective.

    Lightning does it in a signal handler, wherever the rank was interrupted; here it is called between two updates.
    """
    connector = trainer._signal_connector
    connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)  # type: ignore[arg-type]  # the frame is not looked at


def stop_as_terminated(trainer: pl.Trainer) -> None:
    """Lets the loops raise ``SIGTERMException`` where they look for it next, as after a SIGTERM to this rank."""
    trainer._signal_connector.received_sigterm = True
