"""The user's words in all their places: how they merge, what disagrees, what is misspelt."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from lightning_zero.config.dotted import get
from lightning_zero.config.sources import SourcedConfig, compose
from lightning_zero.errors import ConfigError


def composed(config: Any = None, environ: dict[str, str] | None = None, **places: Any) -> SourcedConfig:
    """What is composed, in an environment that says nothing unless told."""
    return compose(config, environ=environ or {}, **places)


def refused(config: Any = None, environ: dict[str, str] | None = None, **places: Any) -> list[str]:
    """The lines of the error."""
    with pytest.raises(ConfigError) as caught:
        composed(config, environ, **places)
    return str(caught.value).splitlines()


def zero(stage: Any = None, **inner: Any) -> dict[str, Any]:
    """A config with a zero_optimization section."""
    return {"zero_optimization": {**({} if stage is None else {"stage": stage}), **inner}}


@pytest.mark.parametrize("config", [None, {}, zero(), zero("auto")])
def test_stage_2_when_nothing_is_said(config: Any) -> None:
    """Proves the default stage, and that it is marked as such."""
    sourced = composed(config)
    assert get(sourced.values, "zero_optimization.stage") == 2
    assert sourced.origins["zero_optimization.stage"] == "default"


@pytest.mark.parametrize(
    ("places", "stage", "origin"),
    [
        ({"stage": 3}, 3, "argument stage=3"),
        ({"stage": "3"}, 3, "argument stage=3"),
        ({"config": zero("auto"), "stage": 1}, 1, "argument stage=1"),
        ({"config": {"bf16": {"enabled": "auto"}}, "stage": 3}, 3, "argument stage=3"),
        ({"config": zero(0)}, 0, "config"),
        ({"config": {"zero_optimization": {"stage": None}}, "stage": 3}, 3, "argument stage=3"),
        ({"config": zero("3"), "stage": 3}, 3, "config"),
        ({"preset": "zero1"}, 1, "preset zero1"),
        ({"preset": "zero1", "config": zero("auto")}, 1, "preset zero1"),
        ({"config": zero(1), "overrides": {"zero_optimization.stage": 3}}, 3, "overrides"),
    ],
)
def test_who_decides_the_stage(places: dict[str, Any], stage: int, origin: str) -> None:
    """Proves that argument, strategy name and config each decide the stage, together when they agree (K11)."""
    sourced = composed(**places)
    assert get(sourced.values, "zero_optimization.stage") == stage
    assert sourced.origins["zero_optimization.stage"] == origin


@pytest.mark.parametrize(
    ("places", "line"),
    [
        ({"config": zero(2), "stage": 3}, "config says 2, argument stage=3 says 3."),
        ({"config": zero(2), "preset": "zero3"}, "config says 2, preset zero3 says 3."),
        ({"preset": "zero3", "stage": 2}, "preset zero3 says 3, argument stage=2 says 2."),
        ({"stage": 3, "overrides": {"zero_optimization.stage": 1}}, "overrides says 1, argument stage=3 says 3."),
    ],
)
def test_two_stages(places: dict[str, Any], line: str) -> None:
    """Proves that two places that say another stage are an error that names both (K11)."""
    assert refused(**places) == [f"zero_optimization.stage: {line} Keep one of the two."]


@pytest.mark.parametrize(
    "places",
    [
        {"config": zero(3, offload_optimizer={"device": "cpu"}), "offload_optimizer": "nvme", "nvme_path": "/n"},
        {"config": zero(3, offload_optimizer=None), "preset": "zero3_offload"},
        {"config": zero(3, offload_optimizer={"device": "none"}), "preset": "zero3_offload"},
        {"preset": "zero3_offload", "offload_optimizer": "nvme", "nvme_path": "/n"},
    ],
)
def test_two_offloads(places: dict[str, Any]) -> None:
    """Proves that two places that say another offload are an error that names the key."""
    (line,) = refused(**places)
    assert line.startswith("zero_optimization.offload_optimizer.device: ")
    assert line.endswith("Keep one of the two.")


def test_a_config_may_add_offload_to_a_name_without_it() -> None:
    """Proves that the name zero3 names the stage only, and merges with a config or an argument that offloads."""
    by_config = composed(zero(offload_optimizer={"device": "cpu", "ratio": "0.5"}), preset="zero3")
    by_argument = composed(preset="zero3", offload_optimizer="cpu")
    assert get(by_config.values, "zero_optimization.offload_optimizer") == {"device": "cpu", "ratio": 0.5}
    assert get(by_argument.values, "zero_optimization.offload_optimizer.device") == "cpu"


def test_precedence_of_other_keys() -> None:
    """Proves overrides over config over preset, leaf by leaf, with the origin of each."""
    sourced = composed(
        zero(overlap_comm=False, reduce_bucket_size=7),
        preset="zero2",
        overrides={"zero_optimization.reduce_bucket_size": "5e7", "fp16": {"loss_scale": 0}, "fp16.hysteresis": 3},
    )
    assert sourced.values["zero_optimization"] == {
        "stage": 2,
        "overlap_comm": False,
        "allgather_bucket_size": 200_000_000,
        "reduce_bucket_size": 50_000_000,
        "contiguous_gradients": True,
    }
    assert sourced.values["fp16"] == {"loss_scale": 0, "hysteresis": 3}
    assert sourced.origins["zero_optimization.overlap_comm"] == "config"
    assert sourced.origins["zero_optimization.reduce_bucket_size"] == "overrides"
    assert sourced.origins["zero_optimization.contiguous_gradients"] == "preset zero2"


def test_no_argument_is_edited_or_shared() -> None:
    """Proves that config and overrides stay the caller's, to the innermost list (K1)."""
    config = {"optimizer": {"type": "AdamW", "params": {"betas": ["0.9", 0.99]}}, "bfloat16": {"enabled": "true"}}
    overrides = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2]}}}
    before = copy.deepcopy((config, overrides))
    sourced = composed(config, overrides=overrides)
    sourced.values["optimizer"]["params"]["betas"].append(1)
    sourced.values["scheduler"]["params"]["warmup_max_lr"].append(1)
    assert (config, overrides) == before


@pytest.mark.parametrize("written", ["bfloat16", "bf16"])
def test_another_spelling_counts_as_the_key(written: str) -> None:
    """Proves that an alias becomes the one key that the rules know, so that it is filled and compared."""
    assert composed({written: {"enabled": "auto"}}).values["bf16"] == {"enabled": "auto"}


@pytest.mark.parametrize(
    ("alias", "key"),
    [
        ("prefetch_bucket_size", "stage3_prefetch_bucket_size"),
        ("param_persistence_threshold", "stage3_param_persistence_threshold"),
        ("gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"),
        ("stage3_gather_fp16_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"),
    ],
)
def test_un_prefixed_zero_keys(alias: str, key: str) -> None:
    """Proves that DeepSpeed's un-prefixed names count as the prefixed ones, and that two values are refused."""
    assert composed(zero(3, **{alias: 1})).values["zero_optimization"] == {"stage": 3, key: 1}
    (line,) = refused(zero(3, **{alias: 1, key: 0}))
    assert line.startswith(f"zero_optimization.{key}: config says ")
    assert f'"{alias}"' in line


def test_deprecated_offload_flags() -> None:
    """Proves that cpu_offload: true is the offload it stands for, so that every check sees it."""
    sourced = composed(zero(2, cpu_offload=True, cpu_offload_param=False))
    assert sourced.values["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    (line,) = refused(zero(2, cpu_offload_param=True))
    assert "DeepSpeed ignores at stage 2" in line


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"stage": 4}, "argument stage=4 says 4. Write 0, 1, 2 or 3."),
        ({"stage": "two"}, 'stage: the argument says "two". Pass 0, 1, 2 or 3.'),
        ({"config": zero(5)}, "config says 5. Write 0, 1, 2 or 3."),
        ({"config": zero("three")}, 'config says "three". Write a whole number there.'),
        ({"config": zero(True)}, "config says true. Write a whole number there."),
        ({"offload_optimizer": "nmve"}, 'says "nmve", which is no offload device. Write "nvme".'),
        ({"config": zero(3, offload_param={"device": "gpu"})}, 'config says "gpu", which is no offload device.'),
        ({"preset": "zero2", "offload_param": "cpu"}, "ignores at stage 2. Use stage 3, or leave offload_param out."),
        ({"stage": 0, "offload_optimizer": "cpu"}, "ignores at stage 0. Use stage 1 or above, or leave"),
        ({"preset": "zero3_ofload"}, 'preset: there is none named "zero3_ofload"; write "zero3_offload".'),
        ({"preset": "fsdp"}, "write one of zero1, zero1_offload, zero2, "),
        ({"config": 3}, "config: is a int. Pass a mapping of DeepSpeed's keys, or the path"),
        ({"config": {"optimizer": {1: 2}}}, "1: is a key in config and not a string."),
    ],
)
def test_words_that_mean_nothing(places: dict[str, Any], message: str) -> None:
    """Proves that an unknown stage, device, preset or kind of config is refused with what to write instead."""
    (line,) = refused(**places)
    assert message in line


def test_offload_that_is_open_or_unused() -> None:
    """Proves that "auto" devices follow the arguments, and that an unused "auto" path does not stay."""
    open_device = zero(3, offload_optimizer={"device": "auto", "nvme_path": "auto"})
    none = composed(open_device)
    assert get(none.values, "zero_optimization.offload_optimizer") == {"device": "none"}
    cpu = composed(open_device, offload_optimizer="cpu")
    assert get(cpu.values, "zero_optimization.offload_optimizer") == {"device": "cpu"}
    assert cpu.origins["zero_optimization.offload_optimizer.device"] == 'argument offload_optimizer="cpu"'


@pytest.mark.parametrize(
    ("places", "path", "origin"),
    [
        ({"nvme_path": Path("/fast")}, "/fast", "nvme_path"),
        ({"environ": {"LIGHTNING_ZERO_NVME_PATH": "/env"}}, "/env", "LIGHTNING_ZERO_NVME_PATH"),
        ({"nvme_path": "/fast", "environ": {"LIGHTNING_ZERO_NVME_PATH": "/env"}}, "/fast", "nvme_path"),
    ],
)
def test_the_nvme_path(places: dict[str, Any], path: str, origin: str) -> None:
    """Proves that the argument, then the variable, fill both NVMe folders."""
    sourced = composed(preset="zero3_nvme", **places)
    for section in ("offload_optimizer", "offload_param"):
        key = f"zero_optimization.{section}.nvme_path"
        assert get(sourced.values, key) == path
        assert sourced.origins[key] == origin


def test_nvme_without_a_path() -> None:
    """Proves that NVMe offload without a folder is refused, for both sections, with both remedies."""
    lines = refused(preset="zero3_nvme")
    assert [line.partition(":")[0].split(".")[1] for line in lines] == ["offload_optimizer", "offload_param"]
    assert all("Pass nvme_path=... or set LIGHTNING_ZERO_NVME_PATH." in line for line in lines)


def test_a_literal_nvme_path() -> None:
    """Proves that a path in the config is kept whatever the variable says, and that another argument is an error."""
    config = zero(3, offload_optimizer={"device": "nvme", "nvme_path": "/mine"})
    variable = {"LIGHTNING_ZERO_NVME_PATH": "/env"}
    assert get(composed(config, variable).values, "zero_optimization.offload_optimizer.nvme_path") == "/mine"
    (line,) = refused(config, nvme_path="/other")
    assert 'config says "/mine", nvme_path says "/other"' in line


@pytest.mark.parametrize(
    ("config", "near"),
    [
        ({"zero_optimisation": {"stage": 3}}, "zero_optimization"),
        ({"gradient_cliping": 1.0}, "gradient_clipping"),
        ({"train_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu"),
        ({"schedular": {}}, "scheduler"),
        ({"zero_optimization": {"offload_optimiser": {"device": "cpu"}}}, "offload_optimizer"),
        ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, "device"),
        ({"optimizer": {"type": "AdamW", "parms": {"lr": 1}}}, "params"),
        ({"fp16": {"enable": True}}, "enabled"),
    ],
)
def test_a_misspelt_key(config: dict[str, Any], near: str) -> None:
    """Proves that a misspelt key, which DeepSpeed would ignore, is caught with the nearest known one (K14)."""
    (line,) = refused(config)
    assert "DeepSpeed has no such key, and config has it." in line
    assert line.endswith(f'Write "{near}".')


@pytest.mark.parametrize("key", ["my_own_settings", "_comment", "//", "comment"])
def test_an_unknown_key_near_nothing(key: str) -> None:
    """Proves that a key that is like no known one passes unchanged, with a note."""
    sourced = composed({key: {"a": 1}})
    assert sourced.values[key] == {"a": 1}
    assert sourced.notes == (f"{key}: config has it, and DeepSpeed lists no such key. It is passed on unchanged.",)


def test_other_keys_pass_unchanged() -> None:
    """Proves that everything DeepSpeed knows and we do not decide reaches it as it was written."""
    config = {
        "activation_checkpointing": {"partition_activations": True, "number_checkpoints": None},
        "wandb": {"enabled": False, "team": None},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "comms_logger": {"prof_ops": []},
        "optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 400, "cuda_aware": False}},
        "checkpoint": {},
    }
    values = dict(composed(config).values)
    assert values.pop("zero_optimization") == {"stage": 2}
    assert values == config


@pytest.mark.parametrize(
    ("config", "path", "form"),
    [
        ({"optimizer": "auto"}, "optimizer", '"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}'),
        ({"optimizer": {"type": "AdamW", "params": "auto"}}, "optimizer.params", '"params": {"lr": "auto"}'),
        ({"scheduler": "auto"}, "scheduler", '"total_num_steps": "auto"'),
        ({"fp16": "auto"}, "fp16", '"fp16": {"enabled": "auto"}'),
        ({"bf16": True}, "bf16", '"bf16": {"enabled": "auto"}'),
        ({"zero_optimization": True}, "zero_optimization", '"zero_optimization": {"stage": "auto"}'),
        ({"zero_optimization": [3]}, "zero_optimization", '"zero_optimization": {"stage": "auto"}'),
        (zero(3, offload_param="cpu"), "zero_optimization.offload_param", '"offload_param": {"device": "auto"}'),
        ({"aio": [1]}, "aio", "or leave it out"),
    ],
)
def test_something_else_than_a_mapping(config: dict[str, Any], path: str, form: str) -> None:
    """Proves that a whole section given as "auto", or as a list, is an error that shows the leaf form."""
    (line,) = refused(config)
    assert line.startswith(f"{path}: config says ")
    assert " where a mapping belongs. Write " in line
    assert form in line


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            {"train_batch_size": "eight"},
            'train_batch_size: config says "eight". Write a whole number of at least 1 there.',
        ),
        ({"train_batch_size": 0}, "train_batch_size: config says 0. Write a whole number of at least 1 there."),
        ({"gradient_accumulation_steps": 2.5}, "gradient_accumulation_steps: config says 2.5. Write a whole number of"),
        ({"train_micro_batch_size_per_gpu": True}, "config says true. Write a whole number of at least 1 there."),
        ({"gradient_clipping": [1]}, "gradient_clipping: config says [1]. Write a number there."),
        ({"gradient_clipping": "hard"}, 'gradient_clipping: config says "hard". Write a number there.'),
        ({"fp16": {"enabled": "yes"}}, 'fp16.enabled: config says "yes". Write true or false there.'),
        ({"zero_optimization": {"reduce_bucket_size": "inf"}}, "Write a whole number there."),
        ({"optimizer": {"params": {"betas": "0.9, 0.99"}}}, "Write a list of numbers there."),
        ({"optimizer": {"params": {"lr": {"value": 1}}}}, 'lr: config says {"value": 1}. Write a number there.'),
        ({"scheduler": {"params": {"warmup_max_lr": [1, "x"]}}}, "Write a number there."),
    ],
)
def test_a_value_of_the_wrong_kind(config: dict[str, Any], line: str) -> None:
    """Proves that a value that its key cannot hold is refused with what belongs there."""
    (message,) = refused(config)
    assert line in message


def test_all_complaints_stand_in_one_error() -> None:
    """Proves that every bad word of every place is reported together."""
    lines = refused(
        {"zero_optimisation": {}, "optimizer": "auto"},
        preset="zero3",
        overrides={"gradient_cliping": 1, "bf16": 1},
    )
    assert [line.partition(":")[0] for line in lines] == ["optimizer", "zero_optimisation", "bf16", "gradient_cliping"]
    assert "overrides says 1" in lines[2]


def test_the_variable_stands_for_the_config(tmp_path: Path) -> None:
    """Proves that PL_DEEPSPEED_CONFIG_PATH is read when no config is given, and only then."""
    file = tmp_path / "mine.json"
    file.write_text('{"zero_optimization": {"stage": 1}}', encoding="utf-8")
    environ = {"PL_DEEPSPEED_CONFIG_PATH": str(file)}
    sourced = composed(environ=environ)
    assert get(sourced.values, "zero_optimization.stage") == 1
    assert sourced.origins["zero_optimization.stage"] == "config file mine.json (PL_DEEPSPEED_CONFIG_PATH)"
    assert get(composed(zero(3), environ).values, "zero_optimization.stage") == 3


def test_the_variable_is_named_when_its_file_is_missing() -> None:
    """Proves that a user who passed no path learns where it came from."""
    (line,) = refused(environ={"PL_DEEPSPEED_CONFIG_PATH": "gone.json"})
    assert line.startswith("config file gone.json (PL_DEEPSPEED_CONFIG_PATH): is not there")


def test_null_is_as_if_the_key_were_not_there() -> None:
    """Proves that null leaves a key out, and that an override of null takes it out."""
    config = {"gradient_clipping": None, "optimizer": None, "zero_optimization": {"stage": None}, "train_batch_size": 4}
    assert composed(config).values == {"zero_optimization": {"stage": 2}, "train_batch_size": 4}
    taken_out = composed(
        {"optimizer": {"type": "AdamW", "params": {"lr": 1}}, "train_batch_size": 4},
        overrides={"optimizer": None, "train_batch_size": None},
    )
    assert taken_out.values == {"zero_optimization": {"stage": 2}}
    assert set(taken_out.origins) == {"zero_optimization.stage"}


@pytest.mark.parametrize("text", ["['stage', 3]", '{"zero_optimization": {"stage": 3}}'])
def test_a_text_that_is_no_path(text: str) -> None:
    """Proves that a list or a mapping that came as its own text is not searched for on the disk."""
    (line,) = refused(text)
    assert line.startswith("config: is the text ")
    assert "is not there" not in line


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("learning_rate", 'Write "lr"'), ("weight_decya", 'Write "weight_decay"'), ("momentum", "Use adam_w_mode, ")],
)
def test_parameters_that_adam_does_not_take(name: str, remedy: str) -> None:
    """A parameter that DeepSpeed's AdamW would refuse with a TypeError is named with the one to write."""
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, name: 0.1}}}
    with pytest.raises(ConfigError, match=rf"optimizer\.params\.{name}: config has it.*{remedy}"):
        compose(config)
