"""What PEFT's adapters inside a module tell a run. Imports nothing that is not loaded already."""

from __future__ import annotations

import copy
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from lightning_zero.integrations.transformers import Sharding

WEIGHTS = "adapter_model.safetensors"
"""The one file of weights that PEFT reads from a folder."""

CONFIG = "adapter_config.json"


def adapted_models(module: Module) -> list[tuple[str, Any]]:
    """The models with adapters inside a module, at any depth, by name."""
    peft = sys.modules.get("peft")
    if peft is None:
        return []
    return [(name, child) for name, child in module.named_modules() if isinstance(child, peft.PeftModel)]


def is_adapted(module: Module) -> bool:
    """Whether a module is itself a model with adapters."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.PeftModel)


def adapter_names(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The names of a model's state dict that belong to its active adapter, each with its name in PEFT's file.

    Args:
        model: A model with adapters.
        shapes: Whole shapes by the state dict's names.
    """
    return _adapter_names(model, model.active_adapter, shapes)


def _adapter_names(model: Any, adapter: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    from peft import get_peft_model_state_dict

    stand_ins = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    kept = get_peft_model_state_dict(model, state_dict=dict(stand_ins), adapter_name=adapter)
    names = {id(tensor): name for name, tensor in stand_ins.items()}
    return {names[id(tensor)]: name for name, tensor in kept.items()}


def save_adapter_config(model: Any, folder: Path) -> None:
    """Writes what ``PeftModel.from_pretrained`` reads beside the weights.

    Args:
        model: A model with adapters.
        folder: An existing folder.
    """
    base = model.get_base_model()
    config = copy.deepcopy(model.peft_config[model.active_adapter])
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or vars(base).get("name_or_path")
    mapping = None
    if config.task_type is None:  # by which PEFT finds the class of the base model
        mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=mapping)


@contextmanager
def adapted_whole(sharding: Sharding, *, suspended: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Adapters that PEFT adds or loads inside are whole while it makes, casts and fills them, and sharded after that.

    PEFT takes the adapters to be whole when stage 3 has sharded the model around them. Sharded at birth, they would be
    replaced by empty tensors in a 16-bit run, whose adapters it casts to fp32.

    Args:
        sharding: How parameters are sharded.
        suspended: A context in which ``zero.Init``, entered inside this one, does nothing.
    """
    if importlib.util.find_spec("peft") is None:
        yield
        return
    from peft import PeftModel

    running: list[Any] = []  # PEFT's methods call each other

    def whole(method: Callable[..., Any], *, new: bool) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            if running:
                return method(model, *args, **kwargs)
            running.append(model)
            try:
                with suspended():
                    if not new:
                        _make_adapters_whole(model, sharding)
                    result = method(model, *args, **kwargs)
            finally:
                running.clear()
            sharding.shard(model)
            return result

        return call

    replaced = {name: vars(PeftModel)[name] for name in ("__init__", "add_adapter", "load_adapter")}
    for name, method in replaced.items():
        setattr(PeftModel, name, whole(method, new=name == "__init__"))
    try:
        yield
    finally:
        for name, method in replaced.items():
            setattr(PeftModel, name, method)


def _make_adapters_whole(model: Any, sharding: Sharding) -> None:
    shapes = {name: tuple(sharding.whole_shape(value) or value.shape) for name, value in model.named_parameters()}
    names = {name for adapter in model.peft_config for name in _adapter_names(model, adapter, shapes)}
    sharding.make_whole(model, names)
