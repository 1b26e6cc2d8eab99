"""Names, dtypes and sizes as users give them."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.errors import CheckpointError
from lightning_zero.export.keys import common_prefix, rename_keys, without_compile_prefix
from lightning_zero.export.options import parse_dtype, parse_size


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["model.a", "model.b.c"], "model."),
        (["model.a", "head.b"], ""),
        (["model.a", "loose"], ""),
        (["modelling.a", "model.b"], ""),
        ([], ""),
    ],
)
def test_the_prefix_is_what_every_key_carries(keys: list[str], expected: str) -> None:
    """A prefix is detected only when every key lies below the same attribute."""
    assert common_prefix(keys) == expected


def test_the_compile_prefix_goes_wherever_it_is() -> None:
    """`torch.compile` around the whole or a part of the model leaves `_orig_mod.` in names; both are undone."""
    assert without_compile_prefix("_orig_mod.net._orig_mod.weight") == "net.weight"
    keys = ["net._orig_mod.a", "metric.b"]
    assert rename_keys(keys, "net", strip_compile=True, only_below=True) == {"net._orig_mod.a": "a"}
    assert rename_keys(keys, "net.", strip_compile=False, only_below=False) == {
        "net._orig_mod.a": "_orig_mod.a",
        "metric.b": "metric.b",
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [("bf16", torch.bfloat16), ("torch.float16", torch.float16), (torch.float32, torch.float32), (None, None)],
)
def test_dtypes(given: object, expected: torch.dtype | None) -> None:
    """A dtype is a torch dtype or its usual names."""
    assert parse_dtype(given) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "expected"), [(17, 17), ("5GB", 5 * 10**9), ("1.5 MiB", 1_572_864), ("200kb", 200_000), ("7", 7)]
)
def test_sizes(given: int | str, expected: int) -> None:
    """A size is bytes, or a number with a decimal or binary unit."""
    assert parse_size(given) == expected


@pytest.mark.parametrize("given", ["", "GB", "-5MB", "5 apples", 0, "0.1B"])
def test_what_is_no_size(given: int | str) -> None:
    """Anything else is refused with an example."""
    with pytest.raises(CheckpointError, match="such as '5GB'"):
        parse_size(given)
