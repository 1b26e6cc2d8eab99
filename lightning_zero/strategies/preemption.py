"""What a run does when its machine is taken away: all ranks save at the same update, and stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_zero._compat import lightning as _lightning
from lightning_zero.errors import CheckpointError

# What a signal asks for. The ranks agree on the highest that any of them was sent.
_NOTHING, _REQUEUE, _STOP = range(3)


def watch(trainer: pl.Trainer) -> None:
    """Lets a run be preempted, by SIGTERM or by the signal that SLURM sends before the time is over.

    Args:
        trainer: The Trainer, fitting.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    # Last in the list: an update is saved when everything else has seen it.
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, Preemption)]
    callbacks.append(Preemption())


class Preemption(Callback):
    """Saves and stops at an update that the ranks agree on, after a signal to any one of them.

    Lightning's own handlers run collectives from inside the handler, at whatever place the rank was interrupted.
    """

    def __init__(self) -> None:
        self._asked = _NOTHING
        self._updated = False

    @override
    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._replace_handlers(trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._replace_handlers(trainer)

    @override
    def on_before_optimizer_step(self, *_: Any) -> None:
        self._updated = True

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if not self._updated:
            return
        self._updated = False
        asked = _highest(self._asked, trainer.strategy)
        if asked == _NOTHING:
            return
        self._asked = _NOTHING
        if asked == _REQUEUE and _requeues(trainer):
            _lightning.save_and_requeue(trainer)  # SLURM ends the job
            return
        _save(trainer)
        _lightning.stop_as_terminated(trainer)

    def _replace_handlers(self, trainer: pl.Trainer) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # where Python sets no handlers, nor does Lightning
        before = _lightning.handlers_before_run(trainer)
        signal.signal(signal.SIGTERM, self._handler(_STOP, before.get(signal.SIGTERM)))
        requeue = _requeue_signal(trainer)
        if before.get(requeue) in (None, signal.SIG_DFL):  # a user's own handler is left alone
            signal.signal(requeue, self._handler(_REQUEUE, None))

    def _handler(self, asks: int, before: Any) -> Callable[[int, Any], None]:
        def note(number: int, frame: Any) -> None:
            self._asked = max(self._asked, asks)
            if callable(before):
                before(number, frame)

        return note


def _highest(asked: int, strategy: Any) -> int:
    if not dist.is_initialized() or strategy.world_size == 1:
        return asked
    value = torch.tensor(asked, device=strategy.root_device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return int(value)


def _requeues(trainer: pl.Trainer) -> bool:
    environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]  # of every parallel strategy
    return isinstance(environment, SLURMEnvironment) and environment.auto_requeue


def _requeue_signal(trainer: pl.Trainer) -> signal.Signals:
    environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
    chosen = environment.requeue_signal if isinstance(environment, SLURMEnvironment) else None
    return signal.SIGUSR1 if chosen is None else chosen


def _save(trainer: pl.Trainer) -> None:
    path = Path(_lightning.hpc_save_path(trainer)) if _requeues(trainer) else _checkpoint_path(trainer)
    try:
        trainer.save_checkpoint(path)
    except CheckpointError as error:  # the run ends all the same, and what was saved before is there still
        rank_zero_warn(f"The run was asked to stop, and its state could not be saved: {error}")
        return
    rank_zero_info(
        f"The run was asked to stop, and its state is in {path}. "
        f"Go on with `trainer.fit(model, ckpt_path={str(path)!r})`."
    )


def _checkpoint_path(trainer: pl.Trainer) -> Path:
    """Beside the checkpoints of the run, under a name that ``ckpt_path="last"`` finds when it is the newest."""
    callback = trainer.checkpoint_callback
    folder = getattr(callback, "dirpath", None) or trainer.default_root_dir
    last = callback.CHECKPOINT_NAME_LAST if isinstance(callback, ModelCheckpoint) else "last"
    return Path(folder) / f"{last}-preempted.ckpt"
