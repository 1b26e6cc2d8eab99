"""Whole weights in each format, from checkpoints that DeepSpeed and Lightning wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lightning_zero.checkpoint.consolidate import consolidate, load_full_state_dict
from lightning_zero.checkpoint.layout import CLIENT_STATE_KEY
from lightning_zero.checkpoint.verify import inspect_checkpoint, verify_checkpoint
from lightning_zero.errors import CheckpointError

FIXTURES = Path(__file__).parents[1] / "data" / "checkpoints"
DEEPSPEED = ["deepspeed-stage1-fp32", "deepspeed-stage2-bf16", "deepspeed-stage3-bf16"]
LIGHTNING = ["lightning-stage2.ckpt", "lightning-stage3.ckpt"]


def expected_weights(name: str) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = torch.load(FIXTURES / f"{Path(name).stem}.expected.pt", weights_only=True)
    return {key: value.float() if value.is_floating_point() else value for key, value in weights.items()}


def read(output: Path, format_: str) -> dict[str, torch.Tensor]:
    if format_ == "safetensors":
        return {key: value for path in output.glob("*.safetensors") for key, value in load_file(path).items()}
    content: dict[str, Any] = torch.load(output, weights_only=True)
    return content["state_dict"] if format_ == "lightning" else content


@pytest.mark.filterwarnings("ignore:.*hyper_parameters.options")
@pytest.mark.parametrize("name", DEEPSPEED + LIGHTNING)
@pytest.mark.parametrize("format_", ["safetensors", "lightning", "torch"])
def test_committed_checkpoints(tmp_path: Path, name: str, format_: Any) -> None:
    """Checkpoints of DeepSpeed alone (tag `global_step3`) and of Lightning's strategy give the live weights in every
    format.
    """
    output = consolidate(FIXTURES / name, tmp_path / "out", format=format_)
    weights = read(output, format_)
    expected = expected_weights(name)
    aliases = inspect_checkpoint(FIXTURES / name).aliases
    assert set(weights) == set(expected) - (set(aliases) if format_ == "safetensors" else set())
    for key, value in weights.items():
        assert value.dtype == expected[key].dtype, key
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("name", DEEPSPEED)
def test_tied_weights_are_stored_once(tmp_path: Path, name: str) -> None:
    """W1, W2: safetensors holds one name of each tied weight and notes the others; torch's file holds both over one
    memory.
    """
    aliases = inspect_checkpoint(FIXTURES / name).aliases
    assert aliases["head.weight"] == "embed.weight"
    folder = consolidate(FIXTURES / name, tmp_path / "folder", format="safetensors")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"} | aliases
        assert not set(file.keys()) & set(aliases)
    again = load_full_state_dict(folder)
    assert again.aliases == aliases  # type: ignore[attr-defined]
    assert torch.equal(again["head.weight"], again["embed.weight"])
    weights = torch.load(consolidate(FIXTURES / name, tmp_path / "w.pt", format="torch"), weights_only=True)
    assert weights["head.weight"].data_ptr() == weights["embed.weight"].data_ptr()


@pytest.mark.parametrize("name", DEEPSPEED)
@pytest.mark.parametrize("limit", ["1B", 100, "300B", "5GB"])
def test_file_sizes_are_those_of_the_tensors(tmp_path: Path, name: str, limit: int | str) -> None:
    """W7: at any `max_shard_size` a file is its header and numel x itemsize bytes, although stored tensors are views of
    flat buffers.
    """
    folder = consolidate(FIXTURES / name, tmp_path / "folder", format="safetensors", max_shard_size=limit)
    total = 0
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        size = sum(value.numel() * value.itemsize for value in tensors.values())
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        assert path.stat().st_size == header + size
        assert (
            size <= (limit if isinstance(limit, int) else {"1B": 1, "300B": 300, "5GB": 5e9}[limit])
            or len(tensors) == 1
        )
        total += size
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        assert content["metadata"]["total_size"] == total
        assert set(content["weight_map"].values()) == {path.name for path in folder.glob("*.safetensors")}
    else:
        assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16, "fp32"])
def test_one_dtype_throughout(tmp_path: Path, dtype: Any) -> None:
    """W5, W11: every floating tensor gets the dtype asked for, frozen weights and buffers too; integers and booleans
    keep theirs.
    """
    output = consolidate(FIXTURES / DEEPSPEED[2], tmp_path / "w.pt", format="torch", dtype=dtype)
    weights = torch.load(output, weights_only=True)
    expected = expected_weights(DEEPSPEED[2])
    wanted = {"bfloat16": torch.bfloat16, "fp32": torch.float32}.get(str(dtype), torch.float16)
    for key, value in weights.items():
        assert value.dtype == (wanted if expected[key].is_floating_point() else expected[key].dtype), key
        assert torch.equal(value, expected[key].to(value.dtype)), key
    assert weights["flags"].dtype == torch.bool
    assert weights["counts"].dtype == torch.int64


@pytest.mark.parametrize("name", LIGHTNING)
def test_the_lightning_file(tmp_path: Path, name: str) -> None:
    """W10: it keeps hyper-parameters, epoch and callbacks in plain types, opens with `weights_only=True`, holds nothing
    of DeepSpeed's.
    """
    with pytest.warns(UserWarning, match=r"hyper_parameters.options \(.*Options\)"):
        output = consolidate(FIXTURES / name, tmp_path / "whole.ckpt", format="lightning")
    content = torch.load(output, weights_only=True)
    original = torch.load(next((FIXTURES / name).glob("*/*model_states.pt")), weights_only=False)
    assert content["hyper_parameters"] == {"width": 5}
    assert (content["epoch"], content["global_step"]) == (original["epoch"], original["global_step"])
    assert content["callbacks"]["Remember"] == {"best": torch.tensor(0.25), "seen": 8}
    assert content["loops"] == original["loops"]
    assert content["pytorch-lightning_version"] == original["pytorch-lightning_version"]
    deepspeeds = {"module", "ds_config", "ds_version", "param_shapes", "buffer_names", "dp_world_size", "global_steps"}
    assert deepspeeds < set(original)
    assert not deepspeeds & set(content)


@pytest.mark.parametrize("name", LIGHTNING)
def test_lightning_opens_its_file(tmp_path: Path, name: str) -> None:
    """W10: `load_from_checkpoint` gives a module with the live weights."""
    from tests.data.checkpoints.make import Tiny

    with pytest.warns(UserWarning, match="hyper_parameters.options"):
        output = consolidate(FIXTURES / name, tmp_path / "whole.ckpt", format="lightning")
    tiny = Tiny.load_from_checkpoint(output, map_location="cpu", weights_only=True)
    for key, value in expected_weights(name).items():
        assert torch.equal(tiny.state_dict()[key], value), key


def test_our_own_key_is_left_out(tmp_path: Path) -> None:
    """W10: what `lightning_zero` itself keeps in Lightning's state does not reach the exported file."""
    shutil.copytree(FIXTURES / LIGHTNING[0], tmp_path / "copy")
    path = tmp_path / "copy" / "checkpoint" / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=False)
    torch.save(content | {CLIENT_STATE_KEY: {"rng": [1]}}, path)
    with pytest.warns(UserWarning, match="hyper_parameters.options"):
        output = consolidate(tmp_path / "copy", tmp_path / "whole.ckpt", format="lightning")
    assert CLIENT_STATE_KEY not in torch.load(output, weights_only=True)


def test_paths_become_text(tmp_path: Path) -> None:
    """W10: a path among the hyper-parameters is kept, as text."""
    output = consolidate(FIXTURES / DEEPSPEED[0], tmp_path / "whole.ckpt", format="lightning")
    assert torch.load(output, weights_only=True)["hyper_parameters"] == {"width": 5, "data": "corpus"}


def test_a_consolidated_file_is_a_source_too(tmp_path: Path) -> None:
    """C4: what was written as one format can be inspected, verified and converted to another."""
    first = consolidate(FIXTURES / DEEPSPEED[2], tmp_path / "a.ckpt", format="lightning")
    second = consolidate(first, tmp_path / "b", format="safetensors", max_shard_size=200)
    third = consolidate(second, tmp_path / "c.pt", format="torch")
    kinds = [verify_checkpoint(path, deep=True).kind for path in (first, second, third)]
    assert kinds == ["lightning", "safetensors", "torch"]
    expected = expected_weights(DEEPSPEED[2])
    for path in (first, second, third):
        weights = load_full_state_dict(path)
        assert set(weights) == set(expected)
        assert all(torch.equal(weights[key], value) for key, value in expected.items())


def test_prefixes(tmp_path: Path) -> None:
    """`strip_prefix` shortens the names that have it; a prefix that none has, and two names that become one, are
    refused.
    """
    weights = {"net.a": torch.ones(2), "net._orig_mod.b": torch.ones(3), "c": torch.ones(1)}
    torch.save(weights, tmp_path / "w.pt")
    consolidate(tmp_path / "w.pt", tmp_path / "out", format="safetensors", strip_prefix="net")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"a", "b", "c"}
    with pytest.raises(CheckpointError, match=r"begins with the prefix 'model.'.* They begin: net.a"):
        consolidate(tmp_path / "w.pt", tmp_path / "no", format="safetensors", strip_prefix="model.")
    torch.save(weights | {"a": torch.ones(2)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"'net.a' and 'a' would both be 'a'"):
        consolidate(tmp_path / "w.pt", tmp_path / "no", format="safetensors", strip_prefix="net.")
    assert not (tmp_path / "no").exists()


def test_what_a_format_needs_is_said(tmp_path: Path) -> None:
    """A transformers folder needs a config, a Lightning file needs Lightning's state; each refusal names another
    format.
    """
    torch.save({"a": torch.ones(2)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"no transformers/config.json.*use format='safetensors'"):
        consolidate(tmp_path / "w.pt", tmp_path / "out")
    with pytest.raises(CheckpointError, match="no Lightning state"):
        consolidate(tmp_path / "w.pt", tmp_path / "out.ckpt", format="lightning")
    with pytest.raises(CheckpointError, match="format='onnx' is unknown"):
        consolidate(tmp_path / "w.pt", tmp_path / "out", format="onnx")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="dtype='int8'"):
        consolidate(tmp_path / "w.pt", tmp_path / "out", dtype="int8")
    with pytest.raises(CheckpointError, match="max_shard_size='5 apples'"):
        consolidate(tmp_path / "w.pt", tmp_path / "out", max_shard_size="5 apples")
    with pytest.raises(CheckpointError, match="is the checkpoint itself"):
        consolidate(FIXTURES / DEEPSPEED[0], FIXTURES / DEEPSPEED[0])
    assert [path.name for path in tmp_path.iterdir()] == ["w.pt"]


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    """Progress counts up to the number of bytes written."""
    for format_ in ("safetensors", "torch"):
        seen: list[tuple[int, int]] = []
        consolidate(
            FIXTURES / DEEPSPEED[1],
            tmp_path / format_,
            format=format_,  # type: ignore[arg-type]
            progress=lambda done, total, seen=seen: seen.append((done, total)),  # type: ignore[misc]
        )
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1] == inspect_bytes(DEEPSPEED[1])


def inspect_bytes(name: str) -> int:
    expected, aliases = expected_weights(name), inspect_checkpoint(FIXTURES / name).aliases
    return sum(value.numel() * value.itemsize for key, value in expected.items() if key not in aliases)


def test_loaded_tensors_are_the_callers_own() -> None:
    """Writing into a tensor of the lazy mapping changes neither the file nor the next read."""
    weights = load_full_state_dict(FIXTURES / DEEPSPEED[1])
    first = weights["embed.weight"]
    before = first.clone()
    first.zero_()
    assert torch.equal(weights["embed.weight"], before)
    assert torch.equal(load_full_state_dict(FIXTURES / DEEPSPEED[1])["embed.weight"], before)
