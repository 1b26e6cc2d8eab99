"""Lightning's DeepSpeed precision plugin, with the loss divided once and clipping that clips."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero._compat.lightning import DeepSpeedPrecision, is_overridden
from lightning_zero.errors import ConfigError

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_zero.engine.accumulation import AccumulationWindow


class ZeroPrecision(DeepSpeedPrecision):
    """Backward, clipping and step through the accumulation window of the strategy's engine.

    Args:
        precision: ``32-true``, ``16-mixed``, ``16-true``, ``bf16-mixed`` or ``bf16-true``.

    Raises:
        ValueError: Any other precision.
    """

    window: AccumulationWindow | None = None
    """The window of the engine that trains; the strategy sets it."""

    step_applied: bool = True
    """Whether the last step made an update; False when fp16 overflow skipped it."""

    @property
    def weights_dtype(self) -> torch.dtype:
        """Type of the weights that forward and backward see, in training and in evaluation."""
        return self._desired_dtype

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        if is_overridden("backward", model):
            raise ConfigError(
                f"{type(model).__name__}.backward is overridden, and DeepSpeed's engine runs the backward pass itself. "
                "Remove the override; `on_before_backward` and `on_after_backward` are called."
            )
        assert self.window is not None
        self.window.backward(tensor, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        result = closure()
        self._after_closure(model, optimizer)
        assert self.window is not None
        self.step_applied = self.window.step()
        return result

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if clip_val <= 0:
            return
        if gradient_clip_algorithm != GradClipAlgorithmType.NORM:
            raise ConfigError(
                f"gradient_clip_algorithm={str(gradient_clip_algorithm)!r} cannot be done on sharded gradients. "
                "Use gradient_clip_algorithm='norm'."
            )
        assert self.window is not None
        self.window.clip(float(clip_val))
