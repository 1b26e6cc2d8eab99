"""Whole weights of a live module, gathered one at a time and written as they come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_zero.engine.state import whole_dtype, whole_weight
from lightning_zero.errors import CheckpointError
from lightning_zero.export.atomic import staged_file
from lightning_zero.export.lightning_file import write_lightning_file
from lightning_zero.export.safetensors_dir import TensorSpec


def write_weights_file(
    module: Module, checkpoint: Mapping[str, Any], path: Path, masters: Mapping[Parameter, Tensor]
) -> str | None:
    """Writes a Lightning file of a module's whole weights on rank 0. Collective.

    Args:
        module: The module.
        checkpoint: Lightning's state beside them.
        path: The file.
        masters: See :func:`~lightning_zero.engine.state.set_weights`.

    Returns:
        Why it could not be written, or ``None``; on ranks other than 0 always ``None``.
    """
    content, order = _plan(module, masters)
    gathered = _gather(order, masters)
    if dist.get_rank() != 0:
        for _ in gathered:
            pass
        return None

    def chunks(name: str) -> Iterator[Tensor]:
        # The writer asks in the order of the plan, which is the order in which all ranks gather.
        found, tensor = next(gathered)
        assert found == name, (found, name)
        yield tensor

    try:
        with staged_file(path) as hidden:
            write_lightning_file(hidden, checkpoint, content, chunks)
    except (OSError, CheckpointError, RuntimeError) as failure:
        return str(failure)
    finally:
        for _ in gathered:  # the other ranks are gathering still
            pass
    return None


def _plan(
    module: Module, masters: Mapping[Parameter, Tensor]
) -> tuple[dict[str, Any], list[tuple[str, Parameter | Tensor]]]:
    """The state dict with a spec for each tensor, tied ones with the name of the first, and what is to be gathered."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    content: dict[str, Any] = {}
    order: list[tuple[str, Parameter | Tensor]] = []
    first: dict[int, TensorSpec] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        tensor = parameters.get(name, value)
        if not isinstance(tensor, Tensor):
            content[name] = value
            continue
        if id(tensor) not in first:
            shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
            dtype = whole_dtype(tensor, masters) if isinstance(tensor, Parameter) else tensor.dtype
            first[id(tensor)] = TensorSpec(name, shape, dtype)
            order.append((name, tensor))
        content[name] = first[id(tensor)]
    return content, order


def _gather(
    order: list[tuple[str, Parameter | Tensor]], masters: Mapping[Parameter, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in order:
        yield name, whole_weight(tensor, masters) if isinstance(tensor, Parameter) else tensor.detach().cpu()
