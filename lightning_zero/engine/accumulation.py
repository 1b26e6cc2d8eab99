"""The accumulation window: the micro-batches whose gradients make one update."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_zero._compat.deepspeed import (
    begin_backward,
    clear_gradients,
    end_foreign_backward,
    foreign_backward,
    keeps_gradient_norm,
    leave_backward,
    set_clipping,
)
from lightning_zero.errors import ConfigError

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


_WINDOW = "lightning_zero.window"  # in the metadata of the autograd nodes of a watched engine's outputs


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
        self._watched = False
        self._norm: _Norm | None = None
        self._reached = False  # by the last backward pass, through a watched engine's outputs
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
        if self._watched:
            leave_backward(self._engine)

    def watch(self) -> None:
        """Also counts gradients that come by another engine's backward pass, as a GAN's do; a step without any raises.

        For loops that the user writes. Only the outputs of the engine's own forward are watched.
        """
        self._watched = True
        self._engine.register_forward_hook(self._watch_outputs)

    @contextmanager
    def passed_through(self) -> Iterator[None]:
        """A backward pass of another engine may go through this watched one, whose gradients it then adds to.

        Raises:
            ConfigError: It did in fp16, where each engine has a loss scale of its own.
        """
        self._reached = False
        begin_backward(self._engine)
        with foreign_backward(self._engine):
            yield
        if self._reached:
            if self._engine.fp16_enabled():
                raise ConfigError(
                    f"The backward pass went through {type(self._engine.module).__name__} too, whose fp16 loss scale "
                    "is another one. Use precision='bf16-mixed', or `requires_grad_(False)` on it meanwhile."
                )
            end_foreign_backward(self._engine)
        leave_backward(self._engine)

    def clip(self, max_norm: float) -> None:
        """Clips the gradients of this window to a global norm, at its step."""
        set_clipping(self._engine, max_norm)

    def clip_and_measure(self, max_norm: float, *, must_be_finite: bool) -> Tensor:
        """Clips the gradients of this window to a global norm, at its step, and tells the norm that they had.

        Args:
            max_norm: The largest norm; infinite to measure only.
            must_be_finite: Whether the step raises when the norm is not finite.

        Returns:
            A number that the step fills in; NaN until then.
        """
        if self._norm is not None:
            self._norm.forget()
        self._norm = _Norm(self._engine, max_norm, must_be_finite)
        return self._norm.value

    def step(self) -> bool:
        """Makes the update.

        Returns:
            False when fp16 overflow skipped it.

        Raises:
            ConfigError: The engine is watched, and there are no gradients.
        """
        if self._watched and not self._pending:
            raise ConfigError(
                "optimizer.step() was called with no backward pass since the last step, so there is nothing to update "
                "with. Call `fabric.backward(loss)` before it."
            )
        self._engine.step()
        self._pending = False
        set_clipping(self._engine, self._clipping)
        applied = bool(self._engine.was_step_applied())
        norm, self._norm = self._norm, None
        if norm is not None:
            norm.tell(applied)
        return applied

    def clear(self) -> None:
        """Drops the gradients of an abandoned window; without effect when nothing was added since the last step."""
        if self._norm is not None:
            self._norm.forget()
            self._norm = None
            set_clipping(self._engine, self._clipping)
        if self._pending:
            clear_gradients(self._engine)
            self._pending = False

    def _watch_outputs(self, engine: Any, inputs: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in _tensors(outputs):
                node: Any = tensor.grad_fn
                if node is not None:
                    node.metadata[_WINDOW] = self
                    tensor.register_hook(self._reach)  # type: ignore[no-untyped-call]

    def _reach(self, gradient: Tensor) -> None:
        self._reached = self._pending = True


def windows_behind(loss: Tensor) -> list[AccumulationWindow]:
    """The windows of the watched engines whose outputs a loss is made from; looks at the whole graph."""
    found: dict[int, AccumulationWindow] = {}
    waiting: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        window = node.metadata.get(_WINDOW)
        if window is not None:
            found[id(window)] = window
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                waiting.append(before)
    return list(found.values())


class _Norm:
    """The gradient norm of one update, known when the update is made."""

    def __init__(self, engine: DeepSpeedEngine, max_norm: float, must_be_finite: bool) -> None:
        self.value = torch.full((), math.nan, device=engine.device)
        self._engine = engine
        self._must_be_finite = must_be_finite
        self._hook: Any = None
        if keeps_gradient_norm(engine):
            set_clipping(engine, max_norm)
            return

        def clip(*_: Any) -> None:
            self.value.copy_(torch.nn.utils.clip_grad_norm_(engine.module.parameters(), max_norm))

        set_clipping(engine, 0.0)
        self._hook = engine.basic_optimizer.register_step_pre_hook(clip)

    def forget(self) -> None:
        """The update will not be made."""
        if self._hook is not None:
            self._hook.remove()

    def tell(self, applied: bool) -> None:
        """Fills the value in, after the step."""
        if self._hook is not None:
            self._hook.remove()
        else:
            norm = self._engine.get_global_grad_norm()
            if norm is not None:
                self.value.fill_(float(norm))
        searching_scale = self._engine.fp16_enabled() and not applied
        if self._must_be_finite and not searching_scale and not torch.isfinite(self.value):
            what = "the weights have been updated with it" if applied else "the update was skipped"
            raise RuntimeError(
                f"The gradient norm is {self.value.item()}, and {what}. Look for the first loss that is not finite, or "
                "pass `error_if_nonfinite=False` to `fabric.clip_gradients` to go on."
            )


def _tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _tensors(value)
    elif isinstance(outputs, (list, tuple)):
        for value in outputs:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        for value in vars(outputs).values():
            yield from _tensors(value)
