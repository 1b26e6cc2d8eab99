"""A single Lightning checkpoint file: whole weights beside Lightning's own state, in plain types only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_zero.errors import CheckpointError
from lightning_zero.export.torch_file import Chunks, write_torch_file

__all__ = ["VERSION_KEY", "write_lightning_file"]

VERSION_KEY = "pytorch-lightning_version"


def write_lightning_file(
    path: Path, lightning_state: Mapping[str, Any], weights: Mapping[str, Any], chunks: Chunks
) -> None:
    """Write a file that ``LightningModule.load_from_checkpoint`` opens, tensor by tensor.

    Args:
        path: The file.
        lightning_state: Lightning's state (hyper-parameters, epoch, callbacks, ...): containers, scalars and tensors.
        weights: The state dict: a :class:`TensorSpec` for each tensor, plain values for extra state.
        chunks: Gives the elements of each spec by its name.

    Raises:
        CheckpointError: ``lightning_state`` is not Lightning's.
    """
    if VERSION_KEY not in lightning_state:
        raise CheckpointError(
            f"There is no Lightning state to write beside the weights (no {VERSION_KEY!r}). "
            "Use format='torch' or format='safetensors'."
        )
    kept = {key: value for key, value in lightning_state.items() if key not in ("state_dict", "optimizer_states")}
    write_torch_file(path, {**kept, "state_dict": dict(weights)}, chunks)
