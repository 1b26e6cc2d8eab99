"""The words in which a user gives a dtype and a size."""

from __future__ import annotations

import re

import torch

from lightning_zero.errors import CheckpointError

__all__ = ["parse_dtype", "parse_size"]

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
_UNITS = {"": 1, "B": 1, **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)}


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Read a floating-point dtype.

    Args:
        dtype: A torch dtype, or ``float32``, ``bfloat16``, ``float16`` (also ``fp32``, ``bf16``, ``fp16``, with or
            without ``torch.``), or None.

    Returns:
        The torch dtype, or None for None.

    Raises:
        CheckpointError: Weights are not exported in that dtype.
    """
    if dtype is None:
        return None
    known = _DTYPES.get(str(dtype).removeprefix("torch.").lower())
    if known is None:
        raise CheckpointError(
            f"dtype={str(dtype)!r} is no dtype for exported weights. Use one of float32, bfloat16, float16."
        )
    return known


def parse_size(size: int | str) -> int:
    """Read a number of bytes.

    Args:
        size: Bytes, or a number with a unit: ``5GB`` (powers of 1000) or ``5GiB`` (powers of 1024).

    Returns:
        Bytes, at least 1.

    Raises:
        CheckpointError: It is not a size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise CheckpointError(
            f"max_shard_size={size!r} is not a size. Give bytes, or a number with a unit such as '5GB' or '500MB'."
        )
    return int(float(found[1]) * unit)
