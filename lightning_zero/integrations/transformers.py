"""What a transformers model inside a module tells a run. Imports nothing that is not loaded already."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.nn import Module

_SIZE_NAMES = ("hidden_size", "hidden_sizes")


def pretrained_models(module: Module) -> list[tuple[str, Any]]:
    """The outermost transformers models inside a module, at any depth.

    Args:
        module: Any module.

    Returns:
        Pairs of name and model; a model inside another one is not listed.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    found: list[tuple[str, Any]] = []
    for name, child in module.named_modules():
        inside = any(outer == "" or name == outer or name.startswith(f"{outer}.") for outer, _ in found)
        if not inside and isinstance(child, transformers.PreTrainedModel):
            found.append((name, child))
    return found


def hidden_size(module: Module) -> tuple[int, str] | None:
    """The largest hidden size of any transformers model in a module.

    Args:
        module: Any module.

    Returns:
        The size and the place it was read from, or ``None`` when there is no such model.
    """
    sizes = [
        (size, f"module.{name + '.' if name else ''}config.{place}")
        for name, model in pretrained_models(module)
        for size, place in _sizes(model.config)
    ]
    return max(sizes, default=None, key=lambda pair: pair[0])


def _sizes(config: Any, prefix: str = "", seen: frozenset[int] = frozenset()) -> Iterator[tuple[int, str]]:
    if id(config) in seen:
        return
    for name in _SIZE_NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int):
            yield value, prefix + name
        elif isinstance(value, (list, tuple)) and value:
            yield max(value), prefix + name
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):  # `text_config`, and the `encoder` and `decoder` of a pair of models
            yield from _sizes(value, f"{prefix}{name}.", seen | {id(config)})


def save_configs(model: Any, folder: Path) -> None:
    """Writes what ``save_pretrained`` writes beside the weights: config and, if there is one, generation config.

    Args:
        model: A transformers model, whose weights may be sharded.
        folder: An existing folder.
    """
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]  # save_pretrained notes it, the config alone does not
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(folder)
