"""Folders that `from_pretrained` reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.checkpoint.consolidate import consolidate
from lightning_zero.checkpoint.layout import TRANSFORMERS_FOLDER
from lightning_zero.checkpoint.verify import inspect_checkpoint
from lightning_zero.errors import CheckpointError
from lightning_zero.export.transformers_dir import MODULE_FILE, write_module_file

VOCABULARY = 37


def llama(tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=tied,
        )
    )


def checkpoint_of(model: Any, folder: Path, prefix: str, extra: dict[str, torch.Tensor] | None = None) -> Path:
    """A stage-0 checkpoint as DeepSpeed lays it out, with the model's own files beside it."""
    module = {prefix + name: value for name, value in model.state_dict().items()} | (extra or {})
    (folder / "step").mkdir(parents=True)
    torch.save(
        {"module": module, "buffer_names": [], "dp_world_size": 1}, folder / "step" / "mp_rank_00_model_states.pt"
    )
    (folder / "latest").write_text("step")
    model.config.save_pretrained(folder / TRANSFORMERS_FOLDER)
    model.generation_config.save_pretrained(folder / TRANSFORMERS_FOLDER)
    return folder


def assert_same(loaded: Any, model: Any, dtype: torch.dtype) -> None:
    expected = model.state_dict()
    actual = loaded.state_dict()
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert actual[name].dtype == dtype, name
        assert torch.equal(actual[name], value.to(dtype)), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("prefix", ["", "model.", "net._orig_mod."])
def test_from_pretrained_reads_it(tmp_path: Path, tied: bool, prefix: str) -> None:
    """W1, M4: tied and untied, bare, below an attribute and compiled: `from_pretrained` gives the weights, and ties
    them again.
    """
    from transformers import AutoModelForCausalLM

    model = llama(tied)
    source = checkpoint_of(model, tmp_path / "a.ckpt", prefix)
    output = consolidate(source, tmp_path / "out", dtype="bfloat16", max_shard_size="4KB")
    assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"
    assert (output / "generation_config.json").is_file()
    loaded, report = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same(loaded, model, torch.bfloat16)
    same = loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert same == tied
    assert inspect_checkpoint(output).kind == "transformers"


def test_the_noted_prefix_selects_the_model(tmp_path: Path) -> None:
    """With a note where the model sits, the LightningModule's other weights are left out."""
    from transformers import AutoModelForCausalLM

    model = llama(True)
    source = checkpoint_of(model, tmp_path / "a.ckpt", "net.", {"metric.total": torch.tensor(1.0)})
    write_module_file(source / TRANSFORMERS_FOLDER, "net.")
    output = consolidate(source, tmp_path / "out")
    assert_same(AutoModelForCausalLM.from_pretrained(output), model, torch.float32)
    assert {tensor.name for tensor in inspect_checkpoint(output).tensors} == set(model.state_dict())
    assert not (output / MODULE_FILE).exists()


def test_a_folder_of_the_transformers_trainer(tmp_path: Path) -> None:
    """C4: a `checkpoint-N` folder keeps `config.json` at its root and DeepSpeed's shards below: that is enough."""
    from transformers import AutoModelForCausalLM

    model = llama(False)
    source = checkpoint_of(model, tmp_path / "checkpoint-5", "")
    for path in (source / TRANSFORMERS_FOLDER).iterdir():
        path.rename(source / path.name)
    shutil.rmtree(source / TRANSFORMERS_FOLDER)
    assert_same(AutoModelForCausalLM.from_pretrained(consolidate(source, tmp_path / "out")), model, torch.float32)


def test_a_damaged_note_is_explained(tmp_path: Path) -> None:
    """A note that is no JSON is answered with what it should hold."""
    source = checkpoint_of(llama(False), tmp_path / "a.ckpt", "")
    (source / TRANSFORMERS_FOLDER / MODULE_FILE).write_text("model.")
    with pytest.raises(CheckpointError, match=r"module.json is damaged"):
        consolidate(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
