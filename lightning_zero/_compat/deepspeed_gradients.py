"""DeepSpeed's undocumented names around reduced gradients, each with what it is and where it was last seen (0.19.8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def is_spread(parameter: Any) -> bool:
    """Whether an engine of stages 1 to 3 has spread this parameter's reduced gradient over the ranks."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def own_gradient(parameter: Any) -> Tensor | None:
    """This rank's part of a gradient, reduced and still scaled, between the last backward of a window and the step.

    ``safe_get_full_grad`` would gather each parameter.

    * stage 3: ``safe_get_local_grad``, with the padding of the last rank;
    * stages 1 and 2, with ``BF16_Optimizer`` too: what ``get_full_hp_grad`` adds up. ``_hp_mapping`` is None on ranks
      that hold no part, and ``BF16_Optimizer`` keeps the whole gradient of which only a part is this rank's.

    Args:
        parameter: A parameter for which :func:`is_spread` holds.
    """
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_local_grad

        share: Tensor | None = safe_get_local_grad(parameter)
        return share
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    gradient: Tensor = mapping.get_lp_grad_fragment(parameter._index_in_param_group).flatten()
    place = mapping.lp_fragment_address
    return gradient.narrow(0, place.start, place.numel) if gradient.numel() == parameter.numel() else gradient


def loss_scale(engine: DeepSpeedEngine) -> float | None:
    """The factor of an fp16 engine's loss; None without fp16."""
    if not engine.fp16_enabled():
        return None
    scale = engine._get_optimizer_loss_scale()  # optimizers keep it in three places
    return None if scale is None else float(scale)
