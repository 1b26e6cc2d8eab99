"""A LightningModule from a checkpoint, without a Trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
import torch

from lightning_zero._compat.lightning import build_from_checkpoint
from lightning_zero.checkpoint.consolidate import WholeWeights
from lightning_zero.checkpoint.layout import locate
from lightning_zero.checkpoint.shards import TensorRef
from lightning_zero.checkpoint.source import Source, open_path
from lightning_zero.checkpoint.states import DEEPSPEED_KEYS
from lightning_zero.checkpoint.unpickle import NOT_PLAIN, to_plain
from lightning_zero.errors import CheckpointError

M = TypeVar("M", bound=pl.LightningModule)


def load_from_checkpoint(
    cls: type[M],
    path: str | os.PathLike[str],
    *,
    map_location: Any = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> M:
    """A LightningModule with its weights, as its own ``load_from_checkpoint`` gives, from a sharded folder too.

    The module is whole, in this process, on its own: no process group and no engine. A network that is built in
    ``configure_model`` is built.

    Args:
        cls: The LightningModule's class.
        path: A sharded checkpoint's folder, a tag folder or shard in it, or a Lightning file.
        map_location: As in Lightning; for a sharded checkpoint, the device of the module. Default: the CPU.
        strict: Whether names must be equal; default: what the module's ``strict_loading`` says.
        weights_only: As in Lightning. A sharded checkpoint is read without running any code that it holds unless this
            is ``False``.
        kwargs: Arguments of the class, before those that ``save_hyperparameters`` has saved.

    Returns:
        The module.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or it holds no state of a LightningModule.
    """
    location = locate(path)
    if location.kind == "torch":
        loaded: M = cls.load_from_checkpoint(
            location.root, map_location=map_location, strict=strict, weights_only=weights_only, **kwargs
        )
        return loaded
    if location.kind == "safetensors":
        raise CheckpointError(
            f"{path} holds weights and no state of a LightningModule. Make one, and load them with "
            "`module.load_state_dict(lightning_zero.load_full_state_dict(path))`."
        )
    source = open_path(path)
    checkpoint = _everything(source) if weights_only is False else _plain(cls, source)
    arguments = cls.CHECKPOINT_HYPER_PARAMS_KEY
    checkpoint[arguments] = {**checkpoint.get(arguments, {}), **kwargs}
    checkpoint["state_dict"] = {**WholeWeights(source, None), **source.extras}
    module = cast(M, build_from_checkpoint(cls, checkpoint, strict=strict, **kwargs))
    return module if map_location is None else module.to(map_location)


def _plain(cls: type[pl.LightningModule], source: Source) -> dict[str, Any]:
    """Lightning's state in plain types, in which nothing can hide."""
    dropped: list[str] = []

    def tensor(leaf: Any) -> Any:
        return leaf.load().clone() if isinstance(leaf, TensorRef) else NOT_PLAIN

    state: dict[str, Any] = to_plain(dict(source.client_state), tensor, dropped)
    lost = [name for name in dropped if name.startswith(cls.CHECKPOINT_HYPER_PARAMS_KEY)]
    if lost:
        raise CheckpointError(
            f"{source.location.root} holds hyper-parameters of classes that are not read from a file: "
            f"{', '.join(lost)}. Pass weights_only=False if you trust it, or these arguments themselves."
        )
    return state


def _everything(source: Source) -> dict[str, Any]:
    name = next(file.name for file in source.manifest.files if file.role == "model")
    content: Mapping[str, Any] = torch.load(
        source.location.folder / name, map_location="cpu", mmap=True, weights_only=False
    )
    return {key: value for key, value in content.items() if key not in DEEPSPEED_KEYS}
