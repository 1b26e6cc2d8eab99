"""``zero.Init`` from the inside: what is overridden, why it is needed and where it was last seen (0.19.8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import Module


def casting_init(config: Mapping[str, Any]) -> Any:
    """A ``zero.Init`` that gives parameters the 16-bit type of a config, and leaves every other tensor alone.

    DeepSpeed's own has ``torch.tensor``, ``zeros`` and their like make 16-bit tensors: running statistics and the
    states of metrics lose their digits, even where the call says float32, and parameters are drawn in 16 bits, so that
    a seed gives other weights than below stage 3, where the engine casts what was drawn in fp32. The dtype half of its
    ``tensor_overrides`` is left out here, and ``_post_init_method``, which shards the parameters of a module that has
    just been made, casts them first.

    Args:
        config: What ``zero.Init`` takes.
    """
    from deepspeed.runtime.zero.partition_parameters import DeepSpeedTensorOverride, Init

    class CastingInit(Init):  # type: ignore[misc]  # DeepSpeed ships no types
        def _post_init_method(self, module: Module) -> None:
            for parameter in module.parameters(recurse=False):
                if parameter.is_floating_point() and not hasattr(parameter, "ds_id"):
                    parameter.data = parameter.data.to(self.dtype)
            super()._post_init_method(module)

    return CastingInit(config_dict_or_path=dict(config), tensor_overrides=[DeepSpeedTensorOverride.device])
