"""Checkpoints of two ranks in which every weight is the number of the save, written without an engine."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_zero.checkpoint.consolidate import load_full_state_dict
from lightning_zero.checkpoint.verify import verify_checkpoint

_TEMPLATE = Path(__file__).parents[1] / "data" / "checkpoints" / "deepspeed-stage1-fp32"


class NumberedShards:
    """Writes what DeepSpeed would write if each weight were the number of the save."""

    def __init__(self) -> None:
        tag = (_TEMPLATE / "latest").read_text().strip()
        self._files = {
            path.name: torch.load(path, weights_only=False) for path in sorted((_TEMPLATE / tag).glob("*.pt"))
        }

    def write(self, folder: Path, number: int, rank: int) -> None:
        """Writes a rank's files, each in two halves, between which the audit event ``tests.half`` is raised.

        Args:
            folder: The tag's folder.
            number: What each weight is, and the epoch.
            rank: 0 or 1; 0 writes the model file too.
        """
        for name, content in self._files.items():
            if (1 if "rank_1_" in name else 0) != rank:
                continue
            _fill(content, number)
            if "model" in name:
                content["epoch"] = number
            memory = io.BytesIO()
            torch.save(content, memory)
            half = len(memory.getvalue()) // 2
            with (folder / name).open("wb") as file:
                file.write(memory.getvalue()[:half])
                file.flush()
                sys.audit("tests.half")
                file.write(memory.getvalue()[half:])


def number_of(path: str | os.PathLike[str]) -> int:
    """The number of the save that a path stands for, read and compared in every byte.

    Args:
        path: A checkpoint.

    Raises:
        CheckpointError: It is damaged.
        AssertionError: It is a mixture of several.
    """
    manifest = verify_checkpoint(path, deep=True)
    assert manifest.epoch is not None
    for name, weight in load_full_state_dict(path).items():
        if weight.is_floating_point():
            assert torch.equal(weight, torch.full_like(weight, manifest.epoch)), (path, name, manifest.epoch)
    return manifest.epoch


def _fill(content: Any, number: int) -> None:
    if isinstance(content, torch.Tensor):
        if content.is_floating_point():
            content.data.fill_(number)
    elif isinstance(content, dict):
        for value in content.values():
            _fill(value, number)
    elif isinstance(content, (list, tuple)):
        for value in content:
            _fill(value, number)
