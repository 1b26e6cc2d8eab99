"""Saving and loading for a strategy: which file or folder a path is, and what of it goes where."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.nn import Module, Parameter

from lightning_zero.checkpoint.consolidate import load_full_state_dict
from lightning_zero.checkpoint.layout import CLIENT_STATE_KEY, TRANSFORMERS_FOLDER, CheckpointLocation, locate
from lightning_zero.checkpoint.manifest import Manifest
from lightning_zero.checkpoint.publish import Save, abandon_save, begin_save, publish_save
from lightning_zero.checkpoint.source import open_path
from lightning_zero.checkpoint.states import DEEPSPEED_KEYS
from lightning_zero.engine import state
from lightning_zero.engine.empty_states import written_as_shards
from lightning_zero.engine.session import EngineSession
from lightning_zero.errors import CheckpointError, CheckpointNotFoundError
from lightning_zero.export.atomic import staged_folder
from lightning_zero.export.keys import without_compile_prefix
from lightning_zero.export.lightning_file import VERSION_KEY
from lightning_zero.export.transformers_dir import write_module_file
from lightning_zero.integrations.peft import adapted_models
from lightning_zero.integrations.transformers import pretrained_models, save_configs
from lightning_zero.strategies.meeting import on_rank_zero
from lightning_zero.strategies.weights_file import write_weights_file

T = TypeVar("T")


@dataclass(frozen=True)
class Opened:
    """A checkpoint that was found and is whole, the path that was given for it, and its version at that moment."""

    path: str | PathLike[str]
    location: CheckpointLocation
    manifest: Manifest
    version: tuple[int, int] | None


# Saving


def save_sharded(
    session: EngineSession, checkpoint: Mapping[str, Any], path: str | PathLike[str], *, exclude_frozen: bool
) -> None:
    """Writes weights and optimizer states, one shard by each rank. Collective.

    Args:
        session: A training engine's.
        checkpoint: Lightning's state.
        path: The checkpoint's folder; a checkpoint that is there lives until the new one is whole.
        exclude_frozen: Leave frozen parameters out.

    Raises:
        CheckpointError: Some rank could not write; nothing of it is left, and what was there before is there still.
    """
    client = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    client[CLIENT_STATE_KEY] = {**client.get(CLIENT_STATE_KEY, {}), "rng": state.rng_states()}
    save = on_rank_zero(lambda: begin_save(local_path(path)), f"saving {path}")
    with written_as_shards(session.module):
        error = state.save_shards(session.engine, save.root, save.written, client, exclude_frozen=exclude_frozen)
    _finish(save, state.all_errors(error), lambda: _publish(save, session.module))


def save_weights(
    module: Module,
    checkpoint: Mapping[str, Any],
    path: str | PathLike[str],
    *,
    masters: Mapping[Parameter, torch.Tensor],
) -> None:
    """Writes one Lightning file of whole weights, tensor by tensor. Collective.

    Args:
        module: The LightningModule.
        checkpoint: Lightning's state.
        path: The file; one that is there lives until the new one is whole.
        masters: See :func:`~lightning_zero.engine.state.set_weights`.

    Raises:
        CheckpointError: The file could not be written; what was there before is there still.
    """
    errors = state.all_errors(write_weights_file(module, checkpoint, local_path(path), masters))
    if errors:
        raise CheckpointError(f"saving {path} failed: {errors[0][1]}. What was there before is untouched.")


def _publish(save: Save, module: Module) -> None:
    try:
        models = pretrained_models(module)
        if len(models) == 1 and not adapted_models(module):  # with adapters in it, no such model could be read
            name, model = models[0]
            with staged_folder(save.root / TRANSFORMERS_FOLDER) as folder:
                save_configs(model, folder)
                write_module_file(folder, without_compile_prefix(f"{name}.") if name else "")
        publish_save(save)
    except BaseException:
        abandon_save(save)
        raise


def _finish(save: Save, errors: list[tuple[int, str]], publish: Callable[[], None]) -> None:
    if not errors:
        on_rank_zero(publish, f"saving {save.path}")
        return
    if dist.get_rank() == 0:
        abandon_save(save)
    dist.barrier()  # no rank goes on while the remains are still there
    rank, text = errors[0]
    raise CheckpointError(
        f"saving {save.path} failed on rank {rank}: {text}. Nothing of it is left, and an earlier checkpoint of that "
        "name is untouched."
    )


def local_path(path: str | PathLike[str]) -> Path:
    """A path that DeepSpeed, or several ranks at once, can write to.

    Args:
        path: What the user gave.

    Raises:
        CheckpointError: It is a remote URL.
    """
    if "://" in str(path):
        raise CheckpointError(
            f"{path} is a remote URL, and ranks write their parts to local paths only. Save to a local or shared disk."
        )
    return Path(path)


# Loading


def open_checkpoint(path: str | PathLike[str]) -> Opened:
    """Finds a checkpoint and makes sure that it is whole, before anything is changed. Collective.

    Args:
        path: What the user gave as ``ckpt_path``.

    Raises:
        CheckpointError: There is none, or it is damaged; on all ranks.
    """

    def look() -> Opened:
        source = open_path(path)
        return Opened(path, source.location, source.manifest, source.location.version)

    return on_rank_zero(look, f"loading {path}")


def lightning_state(opened: Opened, weights_only: bool | None) -> dict[str, Any]:
    """Lightning's state of a checkpoint, with its weights under ``state_dict``, read when they are asked for.

    Args:
        opened: The checkpoint.
        weights_only: As in :func:`torch.load`, for a single file.

    Raises:
        CheckpointError: The checkpoint holds weights alone.
    """
    manifest, location = opened.manifest, opened.location
    if location.kind == "sharded":
        return while_it_is_there(opened, _sharded_state)
    if manifest.kind != "lightning":
        raise CheckpointError(
            f"{manifest.path} holds weights and no state of a Trainer, so it cannot be a ckpt_path. "
            "Load it with `trainer.strategy.load_weights(path)`."
        )
    content = _load(location.root, weights_only=bool(weights_only))
    if content.get("optimizer_states"):
        rank_zero_warn(
            f"{manifest.path} is a single file, and its optimizer states are not spread over the ranks: the optimizer "
            "starts afresh. Resume from a sharded checkpoint to keep them."
        )
    return content


def load_weights(
    module: Module, path: str | PathLike[str], *, strict: bool, masters: Mapping[Parameter, torch.Tensor]
) -> None:
    """Sets a module's weights from any kind of checkpoint. Collective.

    Args:
        module: The LightningModule, or a part of it.
        path: A sharded folder, a single file, or a folder that ``save_pretrained`` wrote.
        strict: Whether names must be equal.
        masters: See :func:`~lightning_zero.engine.state.set_weights`.

    Raises:
        CheckpointError: The weights do not fit, or the checkpoint is damaged.
    """
    opened, weights = while_it_is_there(open_checkpoint(path), lambda opened: (opened, whole_weights(opened)))
    shapes = {tensor.name: tuple(tensor.shape) for tensor in opened.manifest.tensors}
    prefix = _prefix(module, shapes)
    named = {prefix + name: shape for name, shape in shapes.items()}
    state.check_weights(module, named, strict=strict, where=str(path), missing_frozen=bool(opened.manifest.left_out))
    state.set_weights(module, _Prefixed(weights, prefix), masters=masters)


def set_state_dict(
    module: Module,
    weights: Mapping[str, Any],
    *,
    strict: bool,
    where: str,
    masters: Mapping[Parameter, torch.Tensor],
) -> None:
    """Sets a module's weights from a state dict, whole or read on demand. Collective at stage 3.

    Args:
        module: The module.
        weights: Tensors by name.
        strict: Whether names must be equal.
        where: The checkpoint, for messages.
        masters: See :func:`~lightning_zero.engine.state.set_weights`.
    """
    shapes = getattr(weights, "shapes", None)
    if shapes is None:
        shapes = {name: tuple(value.shape) for name, value in weights.items() if isinstance(value, torch.Tensor)}
    state.check_weights(module, shapes, strict=strict, where=where)
    state.set_weights(module, weights, masters=masters)


class _Prefixed(Mapping[str, Any]):
    """A mapping whose names all begin with a prefix."""

    def __init__(self, weights: Mapping[str, Any], prefix: str) -> None:
        self._weights = weights
        self._prefix = prefix

    def __getitem__(self, name: str) -> Any:
        if not name.startswith(self._prefix):
            raise KeyError(name)
        return self._weights[name[len(self._prefix) :]]

    def __iter__(self) -> Any:
        return (self._prefix + name for name in self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def whole_weights(opened: Opened) -> Mapping[str, torch.Tensor]:
    """The weights of a checkpoint, each read when it is asked for."""
    return load_full_state_dict(opened.location.root, tag=opened.location.tag)


def sharded_client_state(opened: Opened) -> dict[str, Any]:
    """What a sharded checkpoint holds beside weights and optimizer states: Lightning's state, or a user's. Collective.

    Args:
        opened: The checkpoint.
    """
    return while_it_is_there(opened, client_state)


def client_state(opened: Opened) -> dict[str, Any]:
    """The same, of the checkpoint as it was opened."""
    content = _load(_model_file(opened.location), weights_only=False)
    return {key: value for key, value in content.items() if key not in DEEPSPEED_KEYS}


def _sharded_state(opened: Opened) -> dict[str, Any]:
    return {**for_trainer(client_state(opened)), "state_dict": whole_weights(opened)}


def for_trainer(client: Mapping[str, Any]) -> dict[str, Any]:
    """What was saved beside weights, with the keys that a Trainer asks for where another loop has saved.

    Args:
        client: Lightning's state, or that of a Fabric's loop or of a DeepSpeed program, which leaves counters at 0.
    """
    if VERSION_KEY in client:
        return dict(client)
    kept = {key: value for key, value in client.items() if key != CLIENT_STATE_KEY}
    counters = {"epoch": 0, "global_step": 0, "loops": None}
    return {**kept, VERSION_KEY: lightning.__version__, **counters, "callbacks": {}, "lr_schedulers": []}


def read_file(path: str | PathLike[str], *, weights_only: bool) -> dict[str, Any] | None:
    """The content of a torch file, on every rank; ``None`` when the path is any other kind of checkpoint. Collective.

    Args:
        path: What the user gave.
        weights_only: As in :func:`torch.load`.

    Raises:
        CheckpointError: There is nothing, or some rank cannot read it; on all ranks.
    """
    location = on_rank_zero(lambda: locate(path), f"loading {path}")
    if location.kind != "torch":
        return None
    content, error = None, None
    try:
        content = _load(location.root, weights_only=weights_only)
    except (OSError, RuntimeError, pickle.UnpicklingError) as failure:
        error = str(failure) or type(failure).__name__
    errors = state.all_errors(error)
    if errors:
        raise CheckpointError(f"loading {path} failed on rank {errors[0][0]}: {errors[0][1]}")
    return content


def while_it_is_there(opened: Opened, read: Callable[[Opened], T]) -> T:
    """What all ranks read; from the newer tag when another run has overwritten the checkpoint meanwhile. Collective."""
    while True:
        error = None
        try:
            result = read(opened)
        except (CheckpointError, OSError) as failure:
            error = failure
        errors = state.all_errors(None if error is None else str(error))
        now = open_checkpoint(opened.path)
        if now.version != opened.version:
            opened = now
        elif errors:
            raise CheckpointError(f"loading {opened.path} failed on rank {errors[0][0]}: {errors[0][1]}") from error
        else:
            return result


def _prefix(module: Module, shapes: Mapping[str, Any]) -> str:
    """The attribute of a LightningModule under which weights lie that a transformers model was saved with."""
    names = set(state.tensor_shapes(module))
    if not names.isdisjoint(shapes):
        return ""
    for name, _ in pretrained_models(module):
        prefix = f"{name}." if name else ""
        if any(prefix + key in names for key in shapes):
            return prefix
    return ""


def _model_file(location: CheckpointLocation) -> Path:
    names = ("mp_rank_00_model_states.pt", f"zero_pp_rank_{dist.get_rank()}_mp_rank_00_model_states.pt")
    for name in (*names, "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        if (location.folder / name).is_file():
            return location.folder / name
    raise CheckpointNotFoundError(f"{location.folder} has no model file. Copy the checkpoint again, as a whole.")


def _load(path: Path, *, weights_only: bool) -> dict[str, Any]:
    content: dict[str, Any]
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except RuntimeError:  # torch's older format cannot be mapped
        content = torch.load(path, map_location="cpu", weights_only=weights_only)
    return content
