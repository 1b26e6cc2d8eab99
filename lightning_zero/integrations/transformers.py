"""What a transformers model inside a module tells a run. Imports nothing that is not loaded already."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch.nn import Module, Parameter

from lightning_zero.errors import CheckpointError

_SIZE_NAMES = ("hidden_size", "hidden_sizes")
_REFUSES = "_refuses_empty_state_dicts"  # on a module that has the hook


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


def is_pretrained(module: Module) -> bool:
    """Whether a module is itself a transformers model."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def refuse_empty_saves(module: Module) -> None:
    """Lets ``save_pretrained`` on a sharded model raise, where it would write empty tensors without a word.

    It asks the model itself for its state dict, while checkpoints ask the LightningModule around it. Once the
    parameters are whole, in ``GatheredParameters`` or after the engine's end, nothing is refused.

    Args:
        module: A LightningModule that stage 3 shards.
    """
    for name, _ in pretrained_models(module):
        parts = name.split(".") if name else []
        for length in range(1, len(parts) + 1):  # a wrapper of the model, such as PEFT's, too
            part = module.get_submodule(".".join(parts[:length]))
            if not vars(part).get(_REFUSES):
                vars(part)[_REFUSES] = True
                part.register_state_dict_pre_hook(_refuse_empty)  # type: ignore[no-untyped-call]


def _refuse_empty(module: Module, prefix: str, keep_vars: bool) -> None:
    if prefix or keep_vars:
        return
    for name, parameter in module.named_parameters():
        if parameter.numel() < getattr(parameter, "ds_numel", 0):
            raise CheckpointError(
                f"{type(module).__name__}.state_dict() would hold empty tensors such as {name!r}, since stage 3 has "
                "sharded the model. Save it with `trainer.strategy.save_gathered_weights(path)` on every rank."
            )


@contextmanager
def initialised_by_transformers(
    gather: Callable[[Sequence[Parameter]], AbstractContextManager[None]], *, enabled: bool
) -> Iterator[None]:
    """Models built inside get the initial weights that their configs ask for, though their parameters are sharded.

    Args:
        gather: A context in which parameters are whole, and after which all ranks keep rank 0's values.
        enabled: Whether parameters are sharded when they are made.
    """
    if not enabled or importlib.util.find_spec("transformers") is None:
        yield
        return
    from lightning_zero._compat.transformers import gathering_initialisation

    with gathering_initialisation(gather):
        yield
