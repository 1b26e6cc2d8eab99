"""What PEFT's adapters inside a module tell a run. Imports nothing that is not loaded already."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

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
    from peft import get_peft_model_state_dict

    stand_ins = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    kept = get_peft_model_state_dict(model, state_dict=dict(stand_ins), adapter_name=model.active_adapter)
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
