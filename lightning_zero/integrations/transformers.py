"""What a transformers model inside a module tells a run. Imports nothing that is not loaded already."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Size, Tensor, dtype
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


def saved_dtypes(module: Module) -> list[tuple[str, dtype]]:
    """Types in which the transformers models inside a module were saved, by the model's name; as their configs note it.

    Args:
        module: Any module.
    """
    noted = [(name, getattr(model.config, "dtype", None)) for name, model in pretrained_models(module)]
    return [(name, found) for name, found in noted if isinstance(found, dtype)]


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


class Zero3Marker:
    """Tells transformers that parameters are sharded, inside :meth:`shown` and nowhere else.

    ``from_pretrained`` then fills shards, and ``generate`` keeps ranks in step that stop at different lengths. It
    refers to the marker weakly, so whoever runs models keeps this object.

    Args:
        config: A resolved config at stage 3.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._marker: Any = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """A context in which the marker is on; afterwards all is as it was before, another marker too."""
        if "transformers" not in sys.modules:  # without it there is no model that asks
            yield
            return
        from lightning_zero._compat.transformers_zero3 import make_marker, marked

        if self._marker is None:
            self._marker = make_marker(self._config)
        with marked(self._marker):
            yield


@contextmanager
def no_marker() -> Iterator[None]:
    """A context in which transformers builds and loads whole models."""
    if "transformers" not in sys.modules:
        yield
        return
    from lightning_zero._compat.transformers_zero3 import marked

    with marked(None):
        yield


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How parameters are sharded and made whole, by functions of whoever shards them.

    Args:
        gather: A context in which parameters are whole, and after which all ranks keep the writer's values.
        writer: Whether this rank's values are those that are kept.
        whole_shape: Shape of a sharded parameter; ``None`` for any other tensor.
        make_whole: Makes parameters of a module ordinary ones: those of these names, or all.
        shard: Shards the whole parameters of a model, of which others are sharded already, in the type of these.
        built_whole: A context in which models are built whole.
    """

    gather: Callable[[Sequence[Parameter]], AbstractContextManager[None]]
    writer: bool
    whole_shape: Callable[[Tensor], Size | None]
    make_whole: Callable[[Module, set[str] | None], None]
    shard: Callable[[Module], None]
    built_whole: Callable[[], AbstractContextManager[None]]


@contextmanager
def built_by_transformers(marker: Zero3Marker, sharding: Sharding) -> Iterator[None]:
    """Models that transformers builds or loads inside are sharded at birth, and else as if nothing were sharded.

    Initial weights are those that the config asks for, the faults of a checkpoint are found and said on all ranks, no
    rank holds more of it than a tensor, and embeddings can be resized.

    Args:
        marker: The marker of the run.
        sharding: How parameters are sharded. ``zero.Init`` is entered inside this context.
    """
    if importlib.util.find_spec("transformers") is None:
        yield
        return
    import transformers  # noqa: F401  # before anything is replaced in it

    from lightning_zero._compat import transformers as _initialisation
    from lightning_zero._compat import transformers_zero3 as _zero3

    with (
        marker.shown(),
        _zero3.inside_zero_init(),
        _initialisation.gathering_initialisation(sharding.gather),
        _zero3.loading_into_shards(sharding.gather, whole_shape=sharding.whole_shape, writer=sharding.writer),
        _zero3.resizing_whole(make_whole=sharding.make_whole, shard=sharding.shard, built_whole=sharding.built_whole),
    ):
        yield
