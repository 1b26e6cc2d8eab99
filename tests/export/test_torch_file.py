"""Files for `torch.load`, written from a stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.export.safetensors_dir import TensorSpec
from lightning_zero.export.torch_file import write_torch_file

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.uint16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
]


@pytest.mark.parametrize("mapped", [False, True])
def test_torch_load_reads_it(tmp_path: Path, mapped: bool) -> None:
    """Every dtype, shape and nesting comes back equal through `torch.load(weights_only=True)`, mapped or not."""
    streamed = {f"w{index}": torch.randn(4, 3).mul(5).to(dtype) for index, dtype in enumerate(DTYPES)}
    streamed |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "long name " * 30: torch.ones(2)}
    specs = {name: TensorSpec(name, tuple(value.shape), value.dtype) for name, value in streamed.items()}
    content = {"epoch": 3, "nested": [{"small": torch.arange(3)}, (1.5, None)], "state_dict": specs}

    def chunks(name: str) -> Iterator[torch.Tensor]:
        flat = streamed[name].reshape(-1)
        yield from (flat[:5], flat[5:])

    write_torch_file(tmp_path / "w.ckpt", content, chunks)
    loaded: dict[str, Any] = torch.load(tmp_path / "w.ckpt", weights_only=True, mmap=mapped)
    assert loaded["epoch"] == 3
    assert torch.equal(loaded["nested"][0]["small"], torch.arange(3))
    assert loaded["nested"][1] == (1.5, None)
    assert list(loaded["state_dict"]) == list(streamed)
    for name, value in streamed.items():
        actual = loaded["state_dict"][name]
        assert (actual.dtype, actual.shape) == (value.dtype, value.shape)
        assert torch.equal(
            actual.view(torch.uint8) if value.dim() else actual, value.view(torch.uint8) if value.dim() else value
        )
        assert actual.untyped_storage().nbytes() == value.numel() * value.itemsize


def test_equal_specs_are_one_tensor(tmp_path: Path) -> None:
    """W1: tied weights are written once and share memory after loading."""
    spec = TensorSpec("a", (2, 3), torch.float32)
    calls: list[str] = []

    def chunks(name: str) -> list[torch.Tensor]:
        calls.append(name)
        return [torch.arange(6.0)]

    write_torch_file(tmp_path / "w.pt", {"a": spec, "b": TensorSpec("a", (2, 3), torch.float32)}, chunks)
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)
    assert calls == ["a"]
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()


def test_the_bytes_are_the_same_each_time(tmp_path: Path) -> None:
    """Two writes of the same content give the same bytes: no time stamp, no random id."""
    for name in ("1.pt", "2.pt"):
        write_torch_file(tmp_path / name, {"a": torch.ones(3)}, lambda name: [])
    assert (tmp_path / "1.pt").read_bytes() == (tmp_path / "2.pt").read_bytes()
