"""A folder that ``from_pretrained`` reads: weights in safetensors, and beside them what ``save_pretrained`` writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from lightning_zero.errors import CheckpointError
from lightning_zero.export.atomic import sync, write_text

__all__ = ["MODULE_FILE", "copy_model_files", "recorded_prefix", "write_module_file"]

MODULE_FILE = "module.json"
_CONFIG = "config.json"
_NAMES = frozenset(
    {
        *("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json", "tokenizer.json"),
        *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt"),
        *("merges.txt", "tokenizer.model", "spiece.model", "preprocessor_config.json", "processor_config.json"),
        *("image_processor_config.json", "video_preprocessor_config.json", "feature_extractor_config.json"),
    }
)
_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers 5, transformers 4


def write_module_file(folder: Path, prefix: str) -> None:
    """Note where in the LightningModule the transformers model sits.

    Args:
        folder: The folder of the model's ``config.json`` in a checkpoint.
        prefix: What the model's keys begin with in the LightningModule's state dict, such as ``model.``.
    """
    write_text(folder / MODULE_FILE, json.dumps({"prefix": prefix}) + "\n")


def recorded_prefix(folder: Path) -> str | None:
    """What :func:`write_module_file` noted.

    Args:
        folder: The folder of the model's ``config.json`` in a checkpoint.

    Returns:
        The prefix, or None without a note.

    Raises:
        CheckpointError: The note cannot be read.
    """
    path = folder / MODULE_FILE
    if not path.is_file():
        return None
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        return str(note["prefix"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f'{path} is damaged. It should read {{"prefix": "model."}}; pass strip_prefix= instead.'
        ) from error


def copy_model_files(source: Path, output: Path, dtype: torch.dtype | None) -> None:
    """Copy what belongs beside the weights, with the weights' dtype noted in ``config.json``.

    Args:
        source: A folder with a ``config.json``.
        output: An existing folder.
        dtype: The dtype of most weights, or None to leave the note as it is.

    Raises:
        CheckpointError: ``config.json`` is not JSON.
    """
    for path in sorted(source.iterdir()):
        if path.name in _NAMES and path.name != _CONFIG:
            shutil.copyfile(path, output / path.name)
            sync(output / path.name)
    text = (source / _CONFIG).read_text(encoding="utf-8")
    try:
        config = json.loads(text)
    except ValueError as error:
        raise CheckpointError(
            f"{source / _CONFIG} is not JSON ({error}). Copy the model's config.json there."
        ) from error
    if dtype is not None:
        if not any(key in config for key in _DTYPE_KEYS):
            config[_DTYPE_KEYS[0]] = None
        _note_dtype(config, str(dtype).removeprefix("torch."))
    write_text(output / _CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")


def _note_dtype(config: dict[str, Any], name: str) -> None:
    for key in _DTYPE_KEYS:
        if key in config:
            config[key] = name
    for value in config.values():
        if isinstance(value, dict):
            _note_dtype(value, name)
