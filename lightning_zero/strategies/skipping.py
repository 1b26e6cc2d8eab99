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
        self._held: list[Any] = []

    def discount(self, trainer: pl.Trainer, configs: Iterable[LRSchedulerConfig]) -> None:
        """Takes the skipped update out of the loop's count and lets the step schedulers' next step pass.

        The loop steps them after the batch, whatever came of it, and asks nobody; so their ``step`` is held back on
        the instance until then, as torch itself does with ``optimizer.step``.
        """
        discount_update(trainer)
        for config in configs:
            if config.interval == "step":
                config.scheduler.step = _passes  # type: ignore[method-assign]  # that is the point
                self._held.append(config.scheduler)

    def forget(self) -> None:
        """Gives the schedulers their ``step`` back."""
        for scheduler in self._held:
            del scheduler.step
        self._held.clear()


def _passes(*args: Any, **kwargs: Any) -> None:
    """Stands for ``scheduler.step`` after a skipped update."""
