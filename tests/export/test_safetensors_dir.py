"""safetensors files written in parts, in any order, by any number of writers."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lightning_zero.errors import CheckpointError
from lightning_zero.export.safetensors_dir import SafetensorsWriter, TensorSpec, plan_safetensors

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
]


def tensors_of_every_dtype() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    values = {f"layer.{index}": torch.randn(3, index % 4) for index in range(len(DTYPES))}
    typed = {name: value.mul(9).to(dtype) for (name, value), dtype in zip(values.items(), DTYPES, strict=True)}
    return typed | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 5), "ünïcode": torch.ones(1)}


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, tuple(value.shape), value.dtype) for name, value in tensors.items()]


def write(folder: Path, tensors: dict[str, torch.Tensor], limit: int = 10**9) -> list[Path]:
    plan = plan_safetensors(specs_of(tensors), limit)
    folder.mkdir()
    with SafetensorsWriter(plan, folder) as writer:
        writer.prepare()
        for name, value in tensors.items():
            writer.put(name, value)
    plan.write_index(folder)
    return sorted(folder.iterdir())


def test_the_file_is_the_librarys_byte_for_byte(tmp_path: Path) -> None:
    """Every dtype, scalars and empty tensors: the file equals the one that `safetensors.torch.save_file` writes."""
    tensors = tensors_of_every_dtype()
    (path,) = write(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "library.safetensors", metadata={"format": "pt"})
    assert path.read_bytes() == (tmp_path / "library.safetensors").read_bytes()


def test_the_bytes_do_not_depend_on_who_writes(tmp_path: Path) -> None:
    """Many writers, many threads, pieces in random order: the same bytes as one writer, so for any number of ranks."""
    tensors = tensors_of_every_dtype() | {"big": torch.arange(10_000.0).view(100, 100)}
    expected = [path.read_bytes() for path in write(tmp_path / "one", tensors, 500)]
    plan = plan_safetensors(specs_of(tensors), 500)
    folder = tmp_path / "many"
    folder.mkdir()
    pieces = [
        (name, start, value.reshape(-1)[start : start + 7])
        for name, value in tensors.items()
        for start in range(0, max(value.numel(), 1), 7)
    ]
    random.Random(1).shuffle(pieces)
    writers = [SafetensorsWriter(plan, folder) for _ in range(3)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda job: writers[job[0] % 3].put(job[1][0], job[1][2], job[1][1]), enumerate(pieces)))
    writers[0].prepare()
    for writer in writers:
        writer.close()
    plan.write_index(folder)
    assert [path.read_bytes() for path in sorted(folder.iterdir())] == expected


def test_tensors_are_converted_on_the_way(tmp_path: Path) -> None:
    """A tensor of another dtype or layout is written in the planned dtype, row by row."""
    plan = plan_safetensors([TensorSpec("a", (4, 3), torch.bfloat16)], 10**9)
    value = torch.randn(3, 4).t()
    with SafetensorsWriter(plan, tmp_path) as writer:
        writer.put("a", value)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], value.to(torch.bfloat16))


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=20), limit=st.integers(1, 200))
def test_every_tensor_has_one_place(sizes: list[int], limit: int) -> None:
    """Any sizes and limit: files hold each tensor once, in order, without gaps, none over the limit unless it is one
    tensor.
    """
    specs = [TensorSpec(f"t{index:02d}", (size,), torch.float32) for index, size in enumerate(sizes)]
    plan = plan_safetensors(specs, limit)
    assert [name for file in plan.files for name in sorted(file.offsets)] == [spec.name for spec in specs]
    for file in plan.files:
        held = sum(plan.specs[name].nbytes for name in file.offsets)
        assert held <= limit or len([name for name in file.offsets if plan.specs[name].nbytes]) == 1
        assert file.size == len(file.header) + held
        position = len(file.header)
        for name in sorted(file.offsets, key=lambda name: (file.offsets[name], plan.specs[name].nbytes)):
            assert file.offsets[name] == position
            position += plan.specs[name].nbytes
    assert len({file.name for file in plan.files}) == len(plan.files)


def test_an_unknown_dtype_is_refused() -> None:
    """A dtype that safetensors lacks is answered with the format that has it."""
    with pytest.raises(CheckpointError, match=r"no dtype for 'a' \(torch.complex128\). Use format='torch'"):
        plan_safetensors([TensorSpec("a", (1,), torch.complex128)], 100)
