"""Whole weights of a live module, written by all ranks at once, each its own part of the files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.nn import Module

from lightning_zero.engine.gather import LiveWeights
from lightning_zero.engine.session import EngineSession
from lightning_zero.errors import CheckpointError, ConfigError
from lightning_zero.export.atomic import begin_folder, discard, publish_folder
from lightning_zero.export.keys import rename_keys
from lightning_zero.export.options import parse_size
from lightning_zero.export.safetensors_dir import (
    STALE,
    SafetensorsPlan,
    SafetensorsWriter,
    TensorSpec,
    plan_safetensors,
)
from lightning_zero.export.transformers_dir import copy_model_files
from lightning_zero.integrations.peft import (
    CONFIG,
    WEIGHTS,
    adapted_models,
    adapter_names,
    is_adapted,
    save_adapter_config,
)
from lightning_zero.integrations.transformers import is_pretrained, pretrained_models, save_configs
from lightning_zero.strategies.checkpoints import local_path

_CHUNK = 1 << 20  # elements converted and written at once


@dataclass(frozen=True)
class Choice:
    """Which part of a LightningModule is written, and whether as a transformers folder or as PEFT's adapter."""

    part: Module
    pretrained: bool = False
    adapted: bool = False


def choose(module: Module, name: str | None) -> Choice:
    """The part of a LightningModule that a user means.

    Args:
        module: The LightningModule.
        name: The part's name; ``""`` is the LightningModule itself; ``None`` is its transformers model, or that with
            PEFT's adapters around it, if it holds one, else the LightningModule itself.

    Raises:
        ConfigError: There is no such part, or there are several transformers models.
    """
    if name is not None:
        try:
            part = module.get_submodule(name)
        except AttributeError as error:
            raise ConfigError(
                f"module={name!r} is not a part of {type(module).__name__}. Its parts are "
                f"{', '.join(child for child, _ in module.named_children())}."
            ) from error
        part = getattr(part, "_orig_mod", part)  # what torch.compile has wrapped
        return Choice(part, pretrained=is_pretrained(part), adapted=is_adapted(part))
    adapted = dict(adapted_models(module))
    inside = tuple(f"{found}." if found else "" for found in adapted)
    models = [*adapted.items(), *(found for found in pretrained_models(module) if not found[0].startswith(inside))]
    if len(models) > 1:
        names = ", ".join(repr(found) for found, _ in models)
        raise ConfigError(
            f"{type(module).__name__} holds {len(models)} transformers models: {names}. Name one with module=, or "
            "the whole LightningModule with module=''."
        )
    if not models:
        return Choice(module)
    return Choice(models[0][1], pretrained=not adapted, adapted=bool(adapted))


def sixteen_bit(config: Mapping[str, Any]) -> torch.dtype:
    """The 16-bit type of a run; bfloat16 where it has none.

    Args:
        config: A resolved config.
    """
    return torch.float16 if config.get("fp16", {}).get("enabled") is True else torch.bfloat16


def save_gathered(
    module: Module,
    path: str | PathLike[str],
    *,
    session: EngineSession | None,
    dtype: torch.dtype | None,
    name: str | None,
    max_shard_size: int | str,
    exclude_frozen: bool,
    tokenizer: Any,
) -> None:
    """Writes the whole weights of a LightningModule, or of a part of it, to a folder. Collective.

    Args:
        module: The LightningModule.
        path: The folder; rank 0's counts.
        session: The session of the engine around it, if there is one.
        dtype: Of every floating-point tensor; ``None``: fp32 where an engine has fp32 weights, else each one's own.
        name: See :func:`choose`.
        max_shard_size: Most bytes in one file.
        exclude_frozen: Leave frozen parameters out.
        tokenizer: A tokenizer or processor to save beside the weights, or ``None``.

    Raises:
        ConfigError: See :func:`choose`.
        CheckpointError: Some rank could not write, or not all ranks called; nothing of it is left.
    """
    chosen = choose(module, name)
    if name is None and (chosen.pretrained or chosen.adapted):
        _warn_of_weights_outside(module, chosen.part)
    training = None if session is None or session.evaluate else session.engine
    live = LiveWeights(chosen.part, training, exclude_frozen=exclude_frozen)
    if chosen.adapted:
        renamed = adapter_names(chosen.part, {key: live.shape(key) for key in live.names})
        aliases, most = {}, sys.maxsize  # PEFT reads one file
    else:
        every = rename_keys([*live.names, *live.aliases], "", strip_compile=True, only_below=False)
        renamed = {key: every[key] for key in live.names}
        aliases, most = {every[other]: every[key] for other, key in live.aliases.items()}, parse_size(max_shard_size)
    specs = [TensorSpec(name, live.shape(key), live.exported_dtype(key, dtype)) for key, name in renamed.items()]
    plan = plan_safetensors(specs, most, aliases)

    def write_beside(folder: Path) -> None:
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if chosen.adapted:
            (folder / plan.files[0].name).rename(folder / WEIGHTS)
            save_adapter_config(chosen.part, folder)
        # Without the frozen weights, from_pretrained would make up others in their place: no config.json, no model.
        elif chosen.pretrained and not live.left_out:
            configs = folder / "configs"
            configs.mkdir()
            save_configs(chosen.part, configs)
            copy_model_files(configs, folder, plan.main_dtype)
            discard(configs)

    _Save(local_path(path), plan).run(renamed, live, write_beside)


class _Save:
    """One folder in the making, which all ranks share."""

    def __init__(self, target: Path, plan: SafetensorsPlan) -> None:
        self._target = target
        self._plan = plan
        self._hidden: Path | None = None

    def run(self, renamed: dict[str, str], live: LiveWeights, write_beside: Callable[[Path], None]) -> None:
        """Collective: three meetings of all ranks, at which each says how it fared."""
        try:
            [begun, *_] = self._meet(self._begin() if dist.get_rank() == 0 else None)
            if isinstance(begun, str):
                self._fail(0, begun)
            outcomes = self._meet(self._write(begun, renamed, live))
            for rank, outcome in enumerate(outcomes):
                if isinstance(outcome, str):
                    self._fail(rank, outcome)
            if sum(outcomes) < self._plan.total_size:
                self._fail(0, f"{sum(outcomes)} of {self._plan.total_size} bytes were found in the engine's buffers")
            [error, *_] = self._meet(self._publish(write_beside) if dist.get_rank() == 0 else None)
            if error is not None:
                self._fail(0, error)
        except BaseException:
            self._discard()
            raise

    def _begin(self) -> Path | str:
        try:
            self._hidden = begin_folder(self._target)
        except (OSError, CheckpointError) as failure:
            return str(failure)
        return self._hidden

    def _write(self, folder: Path, renamed: dict[str, str], live: LiveWeights) -> int | str:
        """Bytes that this rank has written, or why it could not."""
        failure = None if folder.is_dir() else f"{folder.parent} is not the folder that rank 0 sees; share it"
        written = 0
        with SafetensorsWriter(self._plan, folder) as writer:
            for key, name in renamed.items():
                start, part = live.own_part(key)  # may be collective, so that a rank that cannot write goes on
                if failure is not None:
                    continue
                try:
                    for done in range(0, part.numel(), _CHUNK):
                        written += writer.put(name, part[done : done + _CHUNK], start + done)
                except OSError as error:
                    failure = str(error)
            try:
                if dist.get_rank() == 0 and failure is None:
                    writer.prepare()
            except OSError as error:
                failure = str(error)
        return written if failure is None else failure

    def _publish(self, write_beside: Callable[[Path], None]) -> str | None:
        """Rank 0's last part; what it does not foresee, it still lets the others know."""
        assert self._hidden is not None
        try:
            self._plan.write_index(self._hidden)
            write_beside(self._hidden)
            publish_folder(self._hidden, self._target, (*STALE, WEIGHTS, CONFIG))
        except (OSError, ValueError, TypeError, RuntimeError) as failure:
            return str(failure)
        self._hidden = None
        return None

    def _meet(self, own: Any) -> list[Any]:
        told: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(told, own)
        except RuntimeError as failure:  # a timeout, or the connection to a rank that has left
            raise CheckpointError(
                f"saving {self._target} failed: not all ranks took part ({failure}). Call save_gathered_weights on "
                "every rank, not on rank 0 alone."
            ) from failure
        return told

    def _fail(self, rank: int, why: str) -> None:
        self._discard()
        self._meet(None)  # no rank goes on while the remains are still there
        raise CheckpointError(
            f"saving {self._target} failed on rank {rank}: {why}. Nothing of it is left, and what was there before is "
            "untouched."
        )

    def _discard(self) -> None:
        if self._hidden is not None:
            discard(self._hidden)
            self._hidden = None


def _warn_of_weights_outside(module: Module, model: Module) -> None:
    inside = {id(parameter) for parameter in model.parameters()}
    outside = [name for name, parameter in module.named_parameters() if id(parameter) not in inside]
    if outside:
        shown = ", ".join(outside[:5]) + (f" and {len(outside) - 5} more" if len(outside) > 5 else "")
        rank_zero_warn(
            f"Only the transformers model is written, and {type(module).__name__} has other weights: {shown}. "
            "Write all of it with module='', or name the part with module=."
        )
