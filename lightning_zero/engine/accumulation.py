"""The accumulation window: the micro-batches whose gradients make one update."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_zero._compat.deepspeed import begin_backward, clear_gradients, set_clipping

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def caller_owned(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config for loops that decide themselves when to step: manual optimization and Fabric.

    DeepSpeed's managed accumulation counts micro-batches, or is told before each backward whether an update follows.
    Such a loop cannot say it in advance, and with a boundary set on each backward, stages 1 and 2 keep only the last
    gradient. Below stage 2, ``overlap_comm`` needs to know the boundary during the backward, so it is turned off.

    Args:
        config: A resolved config. Not edited.

    Returns:
        The config with ``managed_gradient_accumulation`` off.
    """
    owned = copy.deepcopy(dict(config))
    owned["managed_gradient_accumulation"] = False
    section = owned.get("zero_optimization", {})
    if section.get("stage", 0) < 2:
        section["overlap_comm"] = False
    return owned


class AccumulationWindow:
    """Backward and step of one engine, so that an abandoned window leaves nothing in the next update.

    Args:
        engine: A training engine.
        clipping: Largest global gradient norm of an update for which :meth:`clip` is not called; 0 does not clip.
    """

    def __init__(self, engine: DeepSpeedEngine, *, clipping: float) -> None:
        self._engine = engine
        self._managed = engine.managed_gradient_accumulation()
        self._clipping = clipping
        self._pending = False
        set_clipping(engine, clipping)
        if self._managed:
            engine.set_gradient_accumulation_boundary(True)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Micro-batches in this context are not the last of their window."""
        if not self._managed:
            yield
            return
        self._engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Adds the gradients of one micro-batch. The loss is not divided: Lightning's loop has done it."""
        if not self._managed:
            begin_backward(self._engine)
        self._pending = True
        self._engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def clip(self, max_norm: float) -> None:
        """Clips the gradients of this window to a global norm, at its step."""
        set_clipping(self._engine, max_norm)

    def step(self) -> bool:
        """Makes the update.

        Returns:
            False when fp16 overflow skipped it.
        """
        self._engine.step()
        self._pending = False
        set_clipping(self._engine, self._clipping)
        return bool(self._engine.was_step_applied())

    def clear(self) -> None:
        """Drops the gradients of an abandoned window; without effect when nothing was added since the last step."""
        if self._pending:
            clear_gradients(self._engine)
            self._pending = False
