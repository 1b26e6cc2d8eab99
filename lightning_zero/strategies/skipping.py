"""An update that fp16 overflow has skipped is not an update: no ``global_step``, no step of the learning rate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lightning_zero._compat.lightning import discount_update

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.utilities.types import LRSchedulerConfig


class SkippedUpdate:
    """What is undone when an update was skipped, until the next batch starts."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, type]] = []

    def discount(self, trainer: pl.Trainer, configs: Iterable[LRSchedulerConfig]) -> None:
        """Takes the skipped update out of the loop's count and lets the step schedulers' next step pass.

        The loop steps them after the batch, whatever came of it, and asks nobody. So until then they are of a class
        whose ``step`` does nothing; an attribute in its place would be saved with the scheduler's state.
        """
        discount_update(trainer)
        for config in configs:
            scheduler: Any = config.scheduler
            if config.interval == "step":
                kind = type(scheduler)
                self._held.append((scheduler, kind))
                scheduler.__class__ = type(kind.__name__, (kind,), {"step": _passes})

    def forget(self) -> None:
        """Gives the schedulers their ``step`` back."""
        for scheduler, kind in self._held:
            scheduler.__class__ = kind
        self._held.clear()


def _passes(*args: Any, **kwargs: Any) -> None:
    """Stands for ``scheduler.step`` after a skipped update."""
