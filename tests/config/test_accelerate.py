"""Accelerate's YAML and the variables of ``accelerate launch``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_zero.config.facts import Fact
from lightning_zero.config.sources import compose
from lightning_zero.errors import ConfigError
from tests.config.runs import resolved, said, value

INLINE = {
    "zero_stage": 3,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "offload_optimizer_device": "cpu",
    "offload_param_device": "none",
    "offload_optimizer_nvme_path": "none",
    "zero3_init_flag": True,
    "zero3_save_16bit_model": True,
}


def accelerate(folder: Path, deepspeed: Any, **top: Any) -> Path:
    """An Accelerate YAML."""
    file = folder / "accelerate.yaml"
    file.write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", "deepspeed_config": deepspeed, **top}))
    return file


def test_inline_fields(tmp_path: Path) -> None:
    """Proves that each inline plugin field becomes DeepSpeed's key, with the file as its origin."""
    sourced = compose(accelerate(tmp_path, INLINE, mixed_precision="bf16"), environ={})
    assert sourced.values == {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "none"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
    }
    assert set(sourced.origins.values()) == {"config file accelerate.yaml"}


@pytest.mark.parametrize("spelled", ["DEEPSPEED", "deepspeed", "DeepSpeed"])
def test_the_distributed_type(tmp_path: Path, spelled: str) -> None:
    """Proves that the type may be spelled in any case."""
    file = accelerate(tmp_path, {"zero_stage": 1}, distributed_type=spelled)
    assert compose(file, environ={}).values["zero_optimization"]["stage"] == 1


@pytest.mark.parametrize("kind", ["MULTI_GPU", "FSDP", "NO"])
def test_another_distributed_type(tmp_path: Path, kind: str) -> None:
    """Proves that an Accelerate YAML for something else is refused by its type."""
    with pytest.raises(
        ConfigError, match=f'distributed_type: config file accelerate.yaml says "{kind}".*Write DEEPSPEED'
    ):
        compose(accelerate(tmp_path, {}, distributed_type=kind), environ={})


def test_a_mapping_in_accelerates_form() -> None:
    """Proves that the same form is understood when it comes as a dict."""
    sourced = compose({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 1}}, environ={})
    assert sourced.values["zero_optimization"] == {"stage": 1}


@pytest.mark.parametrize("relative", [True, False])
def test_a_config_file_of_its_own(tmp_path: Path, relative: bool) -> None:
    """Proves that the file it points to is read, from beside the YAML too, and its "auto" filled by inline fields."""
    folder = tmp_path / "conf"
    folder.mkdir()
    ds = folder / "ds.json"
    ds.write_text(json.dumps({"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": "auto"}))
    deepspeed = {"deepspeed_config_file": "ds.json" if relative else str(ds), "gradient_accumulation_steps": 4}
    sourced = compose(accelerate(folder, deepspeed), environ={})
    assert sourced.values == {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 4}


def test_file_and_inline_field_disagree(tmp_path: Path) -> None:
    """Proves that a stage in both, unequal, is an error; equal in value is none."""
    ds = tmp_path / "ds.json"
    ds.write_text(json.dumps({"zero_optimization": {"stage": "2"}}))
    fields = {"deepspeed_config_file": str(ds), "zero_stage": 2}
    compose(accelerate(tmp_path, fields), environ={})
    with pytest.raises(
        ConfigError, match=r'zero_optimization\.stage: .*ds\.json says "2", .* says 3\. Write it in one'
    ):
        compose(accelerate(tmp_path, {**fields, "zero_stage": 3}), environ={})


@pytest.mark.parametrize("final", [True, False])
def test_processes_and_machines_are_compared(tmp_path: Path, final: bool) -> None:
    """Proves that each of the three launch numbers is compared with the run's, in either pass."""
    file = accelerate(tmp_path, {"zero_stage": 2}, num_processes="4", num_machines=2, machine_rank=1)
    sourced = compose(file, environ={})
    run = {"num_nodes": Fact(1, "Trainer(num_nodes=1)"), "node_rank": Fact(0, "the cluster environment")}
    assert [line.partition(". ")[0] for line in said(sourced, final=final, **run)] == [
        "num_processes: config file accelerate.yaml says 4, Trainer(devices=2) says 2",
        "num_machines: config file accelerate.yaml says 2, Trainer(num_nodes=1) says 1",
        "machine_rank: config file accelerate.yaml says 1, the cluster environment says 0",
    ]
    same = {"world_size": Fact(4, "a"), "num_nodes": Fact(2, "a"), "node_rank": Fact(1, "a")}
    resolved(sourced, **same)
    resolved(sourced, purpose="evaluate")


def test_launch_numbers_that_are_none(tmp_path: Path) -> None:
    """Proves that a number of processes that is no number is named."""
    with pytest.raises(ConfigError, match=r'num_processes: .* says "many". Write a whole number there'):
        compose(accelerate(tmp_path, {"zero_stage": 2}, num_processes="many"), environ={})


def test_a_section_that_is_no_mapping(tmp_path: Path) -> None:
    """Proves that a deepspeed_config of another form is refused."""
    with pytest.raises(ConfigError, match=r"deepspeed_config: .* holds a list. Write a mapping"):
        compose(accelerate(tmp_path, ["zero_stage"]), environ={})


def test_what_accelerate_launch_asks_for_is_said_and_ours_holds(tmp_path: Path) -> None:
    """Proves that variables of accelerate launch change nothing, and that each difference is a note."""
    ds = tmp_path / "launch.json"
    ds.write_text(json.dumps({"gradient_clipping": 0.5, "train_batch_size": "auto"}))
    environ = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "false",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(ds),
    }
    result = resolved(compose({}, stage=3, environ=environ))
    assert value(result, "zero_optimization.stage") == 3
    assert result.notes == (
        "gradient_clipping: ACCELERATE_DEEPSPEED_CONFIG_FILE asks for 0.5, the config has 0.0. The config holds.",
        "zero_optimization.stage: ACCELERATE_DEEPSPEED_ZERO_STAGE asks for 2, the config has 3. The config holds.",
    )
    assert resolved(compose({}, stage=3, environ={**environ, "ACCELERATE_USE_DEEPSPEED": "false"})).notes == ()


def test_equal_numbers_in_file_and_trainer(tmp_path: Path) -> None:
    """Proves that an Accelerate YAML that agrees with the Trainer trains."""
    sourced = compose(accelerate(tmp_path, INLINE, mixed_precision="no", num_processes=2), environ={})
    clip = Fact(1.0, "Trainer(gradient_clip_val=1.0)")
    result = resolved(sourced, gradient_clip_val=clip)
    assert (result.stage, result.offload_optimizer, result.offload_param) == (3, "cpu", "none")
    assert value(result, "bf16.enabled") is True
