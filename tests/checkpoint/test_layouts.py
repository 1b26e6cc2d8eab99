"""Layouts that need special hardware or versions to be written, laid out by hand as DeepSpeed does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.checkpoint.consolidate import load_full_state_dict
from lightning_zero.checkpoint.verify import inspect_checkpoint
from lightning_zero.errors import CheckpointError

OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def save(root: Path, name: str, content: dict[str, Any]) -> None:
    (root / "step").mkdir(parents=True, exist_ok=True)
    torch.save(content, root / "step" / name)


def model_file(module: dict[str, Tensor], **entries: Any) -> dict[str, Any]:
    return {"module": module, "buffer_names": [], "dp_world_size": 1, "shared_params": {}, **entries}


def assert_equal(weights: Any, expected: dict[str, Tensor]) -> None:
    assert list(weights) == list(expected)
    for name, value in expected.items():
        assert weights[name].dtype == value.dtype, name
        assert torch.equal(weights[name], value), name


def test_partitions_on_nvme(tmp_path: Path) -> None:
    """NVMe offload: a swapped-out partition is an empty tensor with an id; a raw file of that id, padded, holds it."""
    expected = {"a": torch.randn(3, 5), "b": torch.randn(7), "kept": torch.randn(2, 2)}
    module = {name: torch.empty(0) for name in expected}
    groups = [{"a": torch.Size([3, 5]), "b": torch.Size([7])}, {"kept": torch.Size([2, 2])}]
    for rank in (0, 1):
        content = model_file(module, param_shapes=groups) | {"dp_world_size": 2}
        save(tmp_path, f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", content)
        shares = [torch.cat([expected["a"].view(-1), torch.zeros(1)])[rank * 8 :][:8]]
        shares.append(torch.cat([expected["b"], torch.zeros(1)])[rank * 4 :][:4])
        folder = tmp_path / "step" / "offloaded_tensors" / f"rank{rank:02d}"
        folder.mkdir(parents=True)
        (folder / "0_1.tensor.swp").write_bytes(torch.cat([*shares, torch.ones(100)]).numpy().tobytes())
        swapped = torch.empty(0)
        swapped.ds_id = "0_1"  # type: ignore[attr-defined]
        flats = [swapped, expected["kept"].view(-1)[rank * 2 :][:2].clone()]
        save(tmp_path, OPTIM.format(rank), {"optimizer_state_dict": {"partition_count": 2, "fp32_flat_groups": flats}})
    assert_equal(load_full_state_dict(tmp_path), expected)
    offloaded = [file for file in inspect_checkpoint(tmp_path).files if file.role == "offloaded"]
    assert [(file.rank, file.size) for file in offloaded] == [(0, 448), (1, 448)]
    path = tmp_path / "step" / "offloaded_tensors" / "rank01" / "0_1.tensor.swp"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CheckpointError, match=r"rank01/0_1.tensor.swp is shorter"):
        load_full_state_dict(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"rank01/0_1.tensor.swp is missing"):
        load_full_state_dict(tmp_path)


@pytest.mark.parametrize("flat", [True, False])
def test_stage_0_masters_have_no_names(tmp_path: Path, flat: bool) -> None:
    """W3: at stage 0 fp32 copies are a nameless list, or flat and padded; they find their weights again."""
    torch.manual_seed(0)
    masters = {"a": torch.randn(3, 5), "frozen": torch.randn(3, 5), "b": torch.randn(7), "twin": torch.zeros(7)}
    module = {name: value.half() for name, value in masters.items()}
    owned = [masters["b"], masters["a"], masters["twin"]]
    if flat:
        groups = [
            torch.cat([value.view(-1) for value in owned[:1]]),
            torch.cat([*(v.view(-1) for v in owned[1:]), torch.zeros(3)]),
        ]
        optimizer: dict[str, Any] = {"fp32_groups_flat": groups}
    else:
        optimizer = {"fp32_groups": [owned[:1], owned[1:]]}
    save(tmp_path, "mp_rank_00_model_states.pt", model_file(module, optimizer=optimizer, param_shapes=None))
    assert inspect_checkpoint(tmp_path).has_masters
    assert_equal(load_full_state_dict(tmp_path), masters | {"frozen": module["frozen"].float()})


def test_stage_0_masters_that_fit_no_weight(tmp_path: Path) -> None:
    """W11: when one copy matches no weight, all weights are the 16-bit ones: never a mixture."""
    module = {"a": torch.randn(3).half(), "b": torch.randn(4).half()}
    optimizer = {"fp32_groups": [[module["a"].float(), torch.randn(4)]]}
    save(tmp_path, "mp_rank_00_model_states.pt", model_file(module, optimizer=optimizer, param_shapes=None))
    assert not inspect_checkpoint(tmp_path).has_masters
    assert_equal(load_full_state_dict(tmp_path), module)


def test_alignment_between_parameters(tmp_path: Path) -> None:
    """Aligned parameters: the padding that DeepSpeed records after each is skipped, also across partitions."""
    expected = {"a": torch.randn(5), "b": torch.randn(2, 3), "c": torch.randn(1)}
    shapes = [{name: value.shape for name, value in expected.items()}]
    gap = torch.full((3,), torch.nan)
    flat = torch.cat([expected["a"], gap, expected["b"].view(-1), gap[:2], expected["c"]])
    save(tmp_path, "mp_rank_00_model_states.pt", model_file(expected, param_shapes=shapes) | {"dp_world_size": 2})
    for rank, part in enumerate((flat[:9], flat[9:])):
        state = {
            "zero_stage": 1,
            "partition_count": [2],
            "param_alignment_paddings": [[3, 2, 0]],
            "single_partition_of_fp32_groups": [part.clone()],
        }
        save(tmp_path, OPTIM.format(rank), {"optimizer_state_dict": state})
    assert_equal(load_full_state_dict(tmp_path), expected)


def test_partitions_that_do_not_add_up(tmp_path: Path) -> None:
    """Shards whose partitions are too short or too long for the shapes are refused, with the numbers."""
    module = {"a": torch.randn(40)}
    content = model_file(module, param_shapes=[{"a": torch.Size([40])}])
    save(tmp_path, "mp_rank_00_model_states.pt", content)
    for held, message in ((39, "end before the parameter 'a': 39 elements, and 40"), (60, "hold 60 elements.* 40")):
        state = {"zero_stage": 2, "partition_count": [1], "single_partition_of_fp32_groups": [torch.randn(held)]}
        save(tmp_path, OPTIM.format(0), {"optimizer_state_dict": state})
        with pytest.raises(CheckpointError, match=message):
            load_full_state_dict(tmp_path)


def test_an_unknown_layout_is_explained(tmp_path: Path) -> None:
    """Shards that lack what DeepSpeed writes are refused as such, with the way out, not with a KeyError."""
    save(
        tmp_path, "mp_rank_00_model_states.pt", model_file({"a": torch.ones(2)}, param_shapes=[{"a": torch.Size([2])}])
    )
    save(tmp_path, OPTIM.format(0), {"optimizer_state_dict": {"zero_stage": 2, "partition_count": [1]}})
    with pytest.raises(CheckpointError, match=r"single_partition_of_fp32_groups.*zero_to_fp32.py of the DeepSpeed"):
        load_full_state_dict(tmp_path)
    save(tmp_path, "mp_rank_00_model_states.pt", {"module": None})
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states.pt holds no 'module'"):
        load_full_state_dict(tmp_path)


def test_a_state_dict_with_extra_state_and_strides(tmp_path: Path) -> None:
    """Transposed weights come back in row-major order; extra state that is no tensor survives in torch's format."""
    from lightning_zero.checkpoint.consolidate import consolidate

    module: dict[str, Any] = {"a": torch.randn(3, 5).t(), "_extra_state": {"seen": 3}, "b": torch.randn(2)}
    save(tmp_path, "mp_rank_00_model_states.pt", model_file(module, param_shapes=None))
    consolidate(tmp_path, tmp_path / "w.pt", format="torch")
    consolidate(tmp_path, tmp_path / "s", format="safetensors", dtype="bf16")
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)
    assert set(loaded) == {"a", "_extra_state", "b"}
    assert loaded["_extra_state"] == {"seen": 3}
    assert torch.equal(loaded["a"], module["a"])
    assert loaded["a"].is_contiguous()
    assert torch.equal(load_full_state_dict(tmp_path / "s")["a"], module["a"].bfloat16())
