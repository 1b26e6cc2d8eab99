"""A Fabric's checkpoints: a user's state taken apart into an engine, which has shards, and all the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_zero.checkpoint.layout import CLIENT_STATE_KEY
from lightning_zero.checkpoint.states import DEEPSPEED_KEYS
from lightning_zero.engine.session import EngineSession, session_of
from lightning_zero.errors import CheckpointError, ConfigError
from lightning_zero.strategies import checkpoints
from lightning_zero.strategies.fabric_models import SetUpModels
from lightning_zero.strategies.meeting import meet, on_rank_zero
from lightning_zero.strategies.resuming import resume_sharded

Filters = Mapping[str, Callable[[str, Any], bool]]

# A user's key that DeepSpeed or Lightning has one of too, such as "lr_scheduler", would be lost in the file.
_RESERVED = DEEPSPEED_KEYS | {"state_dict", "optimizer_states", CLIENT_STATE_KEY}
_PREFIX = f"{CLIENT_STATE_KEY}."


@dataclass(frozen=True)
class _Parts:
    """A user's state: the key of its model, the model, keys of its optimizer, and everything else."""

    model_key: str
    module: Module
    session: EngineSession | None
    optimizer_keys: tuple[str, ...]
    others: dict[str, Any]

    @property
    def training(self) -> EngineSession | None:
        """The session, when it trains."""
        return None if self.session is None or self.session.evaluate else self.session

    @property
    def masters(self) -> Mapping[Parameter, torch.Tensor]:
        """See :func:`~lightning_zero.engine.state.set_weights`."""
        return {} if self.session is None else self.session.masters


def _take_apart(models: SetUpModels, state: Mapping[str, Any], call: str) -> _Parts:
    found = {key: module for key, value in state.items() if (module := models.find(value)) is not None}
    if not found:
        given = ", ".join(f"{key!r}: {type(value).__name__}" for key, value in state.items()) or "nothing"
        raise ConfigError(
            f"{call}: the state holds {given}, and no model that `fabric.setup` has returned. "
            'Pass {"model": model, "optimizer": optimizer, ...} with what it returned.'
        )
    if len(found) > 1:
        raise ConfigError(
            f"{call}: the state holds {len(found)} models, {' and '.join(map(repr, found))}, and a checkpoint is of "
            f"one engine. Call `{call}` for each of them, with a folder of its own."
        )
    [(key, module)] = found.items()
    optimizers = {name: models.find_optimizer(value) for name, value in state.items() if name != key}
    own = session_of(module)
    for name, session in optimizers.items():
        if session is not None and session is not own:
            raise ConfigError(
                f"{call}: the state holds {name!r}, which is the optimizer of {type(session.module).__name__} and not "
                f"of {type(module).__name__}. Pass each model with its own."
            )
    keys = tuple(name for name, session in optimizers.items() if session is not None)
    others = {name: value for name, value in state.items() if name != key and name not in keys}
    return _Parts(key, module, own, keys, others)


def save(
    models: SetUpModels,
    path: str | PathLike[str],
    state: Mapping[str, Any],
    *,
    filters: Filters | None,
    exclude_frozen: bool,
) -> None:
    """Writes the engine of the state's model, optimizer included, and the rest of the state beside it. Collective.

    Args:
        models: The models that have been set up.
        path: The checkpoint's folder; rank 0's counts.
        state: One model that is trained, and anything else.
        filters: By key of the state, which entries of what is saved there to keep.
        exclude_frozen: Leave frozen parameters out.

    Raises:
        ConfigError: No model, several, or one that is not trained; or a filter of what is sharded.
        CheckpointError: It could not be written; an earlier one of that name is untouched.
    """
    parts = _take_apart(models, state, "fabric.save")
    if parts.training is None:
        raise ConfigError(
            f"fabric.save: {type(parts.module).__name__} was set up without an optimizer, so it has no engine with "
            "shards to save. Write its weights with `fabric.strategy.save_gathered_weights(path, module=model)`."
        )
    for key in filters or {}:
        if key == parts.model_key or key in parts.optimizer_keys:
            raise ConfigError(
                f"fabric.save: filter={{{key!r}: ...}} cannot be applied, since every rank writes its shards as they "
                "are. Leave frozen parameters out by exclude_frozen_parameters=True of the strategy, or write "
                "weights alone with `fabric.strategy.save_gathered_weights`."
            )
    client = {_stored(key): _filtered(_plain(value), (filters or {}).get(key)) for key, value in parts.others.items()}
    meet(path, call="fabric.save")
    agreed = on_rank_zero(lambda: path, f"saving {path}")
    checkpoints.save_sharded(parts.training, client, agreed, exclude_frozen=exclude_frozen)


def load(
    models: SetUpModels,
    path: str | PathLike[str],
    state: dict[str, Any],
    *,
    strict: bool,
    weights_only: bool | None,
    elastic: bool,
    exclude_frozen: bool,
) -> dict[str, Any]:
    """Restores the objects of a state from a checkpoint of any kind. Collective.

    With the model's optimizer in the state, optimizer states come with the weights; without it, weights alone.

    Args:
        models: The models that have been set up.
        path: A sharded folder, a single file, or a folder that ``save_pretrained`` wrote.
        state: One model, and anything else; values that are no objects with a state are replaced.
        strict: Whether names of weights must be equal, and every key of the state be there.
        weights_only: As in :func:`torch.load`, for a single file.
        elastic: Whether optimizer states may be of another stage or number of ranks.
        exclude_frozen: Whether frozen parameters may be missing.

    Returns:
        What else the checkpoint holds.

    Raises:
        ConfigError: No model in the state, or several.
        CheckpointError: The checkpoint is damaged or does not fit; on all ranks, before anything is changed.
    """
    parts = _take_apart(models, state, "fabric.load")
    if parts.training is not None:
        parts.training.window.clear()
    content = checkpoints.read_file(path, weights_only=bool(weights_only))
    if content is not None:
        saved = _load_file(parts, path, content, strict=strict)
    else:
        saved = _load_folder(parts, path, strict=strict, elastic=elastic, exclude_frozen=exclude_frozen)
    for key, value in parts.others.items():
        if key not in saved:
            continue
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(saved.pop(key))
        else:
            state[key] = saved.pop(key)
    return saved


def load_raw(models: SetUpModels, path: str | PathLike[str], target: Any, *, strict: bool) -> None:
    """Sets a module's weights, at any stage, before or after its set-up. Collective.

    Args:
        models: The models that have been set up.
        path: A sharded folder, a single file, or a folder that ``save_pretrained`` wrote.
        target: The model.
        strict: Whether names must be equal.
    """
    module = models.find(target) or target
    session = session_of(module)
    if session is not None and not session.evaluate:
        session.window.clear()
    checkpoints.load_weights(module, path, strict=strict, masters={} if session is None else session.masters)


def _load_folder(
    parts: _Parts, path: str | PathLike[str], *, strict: bool, elastic: bool, exclude_frozen: bool
) -> dict[str, Any]:
    opened = checkpoints.open_checkpoint(path)
    if opened.location.kind != "sharded":
        _refuse_missing(parts, (), path, strict)
        checkpoints.load_weights(parts.module, path, strict=strict, masters=parts.masters)
        return {}
    _refuse_missing(parts, map(_asked, opened.manifest.client_keys), path, strict)
    if parts.optimizer_keys and parts.training is not None:
        client = resume_sharded(
            parts.training,
            opened,
            strict=strict,
            exclude_frozen=exclude_frozen,
            elastic=elastic,
            weights_call="fabric.load_raw(path, model)",
        )
    else:
        checkpoints.load_weights(parts.module, path, strict=strict, masters=parts.masters)
        client = checkpoints.sharded_client_state(opened)
    return {_asked(key): value for key, value in client.items() if key not in _RESERVED}


def _load_file(parts: _Parts, path: str | PathLike[str], content: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    """From another strategy's ``fabric.save``, a Trainer's file, or weights alone."""
    rest = dict(content)
    key = next((name for name in (parts.model_key, "state_dict") if isinstance(rest.get(name), Mapping)), None)
    weights = content if key is None else rest.pop(key)
    if key is None:
        rest = {}
    _refuse_missing(parts, rest, path, strict)
    checkpoints.set_state_dict(parts.module, weights, strict=strict, where=str(path), masters=parts.masters)
    if parts.optimizer_keys:
        for name in parts.optimizer_keys:
            rest.pop(name, None)
        rank_zero_warn(
            f"{path} is a single file, and optimizer states in it are not spread over the ranks: the optimizer starts "
            "afresh. Resume from a sharded checkpoint to keep them."
        )
    return rest


def _refuse_missing(parts: _Parts, saved: Any, path: str | PathLike[str], strict: bool) -> None:
    there = set(saved)
    missing = [key for key in parts.others if key not in there]
    if strict and missing:
        raise CheckpointError(
            f"{path} holds no {', '.join(map(repr, missing))}, which the state asks for. Leave it out of the state, or "
            "pass strict=False."
        )


def _plain(value: Any) -> Any:
    if isinstance(value, (Module, Optimizer)) or hasattr(value, "state_dict"):
        return value.state_dict()
    return value


def _filtered(value: Any, keep: Callable[[str, Any], bool] | None) -> Any:
    if keep is None or not isinstance(value, dict):
        return value
    return {name: entry for name, entry in value.items() if keep(name, entry)}


def _stored(key: str) -> str:
    return f"{_PREFIX}{key}" if key in _RESERVED else key


def _asked(key: str) -> str:
    return key.removeprefix(_PREFIX)
