"""Lightning's DeepSpeed precision plugin, with the loss divided once and clipping that clips."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero._compat.lightning import DeepSpeedPrecision, is_overridden
from lightning_zero._compat.torchmetrics import keep_states_in_fp32
from lightning_zero.errors import ConfigError
from lightning_zero.integrations.transformers import saved_dtypes

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_zero.engine.accumulation import AccumulationWindow


class ZeroPrecision(DeepSpeedPrecision):
    """Backward, clipping and step through the accumulation window of the strategy's engine.

    Args:
        precision: ``32-true``, ``16-mixed``, ``16-true``, ``bf16-mixed`` or ``bf16-true``.
        cast_batch: Whether the floating-point tensors of a batch become of the weights' type before a step gets them.

    Raises:
        ValueError: Any other precision.
    """

    def __init__(self, precision: Any, *, cast_batch: bool = True) -> None:
        super().__init__(precision)
        self.cast_batch = cast_batch

    window: AccumulationWindow | None = None
    """The window of the engine that trains; the strategy sets it."""

    step_applied: bool = True
    """Whether the last step made an update; False when fp16 overflow skipped it."""

    @property
    def weights_dtype(self) -> torch.dtype:
        """Type of the weights that forward and backward see, in training and in evaluation."""
        return self._desired_dtype

    @override
    def convert_module(self, module: Module) -> Module:
        tell_of_saved_types(module, self.weights_dtype, precision=self.precision)
        converted = super().convert_module(module)
        keep_states_in_fp32(converted)
        return converted

    @override
    def convert_input(self, data: Any) -> Any:
        return super().convert_input(data) if self.cast_batch else data

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


def tell_of_saved_types(module: Module, weights: torch.dtype, *, precision: str) -> None:
    """Says of transformers models that were saved in another type which one they have in this run.

    Args:
        module: The module, already built.
        weights: Type of the weights that forward sees.
        precision: What the user asked for.
    """
    for name, saved in saved_dtypes(module):
        if saved != weights:
            rank_zero_info(
                f"{name or type(module).__name__}: saved in {_name(saved)}, in this run {_name(weights)}, "
                f"as precision={precision!r} says."
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
