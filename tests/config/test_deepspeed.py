"""Against the installed DeepSpeed: the keys we list are its keys, and it accepts what we resolve."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.lr_schedules import WarmupDecayLR, WarmupLR
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_zero.config.dotted import find_auto, get, put
from lightning_zero.config.facts import Fact, RunFacts
from lightning_zero.config.keys import ALIASES, KINDS, known_keys
from lightning_zero.config.presets import PRESETS
from lightning_zero.config.resolve import resolve_config
from lightning_zero.config.sources import compose
from lightning_zero.errors import ConfigError
from tests.config.runs import resolved

MODELS = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
}
REMOVED = {"mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"}
"""Keys that DeepSpeed knows only to refuse them with its own words."""


class SizedConfig(DeepSpeedConfig):  # type: ignore[misc]  # deepspeed ships no types
    """DeepSpeed's own config, told the number of processes instead of asking a process group."""

    def __init__(self, config: dict[str, Any], processes: int) -> None:
        self.processes = processes
        super().__init__(config)

    def _configure_train_batch_size(self) -> None:
        self.world_size = self.processes
        super()._configure_train_batch_size()


@pytest.mark.parametrize("section", MODELS)
def test_the_keys_we_know_are_deepspeeds(section: str) -> None:
    """Proves that a release of DeepSpeed that adds, drops or renames a key is noticed here."""
    fields = MODELS[section].model_fields
    theirs = {field.alias or name for name, field in fields.items()}
    ours = set(known_keys(section)) - REMOVED
    assert theirs - ours == set()
    assert ours - theirs - set(fields) == set()


@pytest.mark.parametrize("section", MODELS)
def test_the_kinds_we_know_are_deepspeeds(section: str) -> None:
    """Proves that an integer key is an integer field there, a boolean a boolean, so that strings are read rightly."""
    for name, field in MODELS[section].model_fields.items():
        key = f"{section}.{field.alias or name}"
        kind = KINDS.get(ALIASES.get(key, key))
        if field.annotation in (int, bool, float):
            assert kind == {int: "integer", bool: "boolean", float: "number"}[field.annotation], name


def test_un_prefixed_names_are_all_known() -> None:
    """Proves that every field with an alias counts as its prefixed key."""
    expected = {
        f"zero_optimization.{name}": f"zero_optimization.{field.alias}"
        for name, field in DeepSpeedZeroConfig.model_fields.items()
        if field.alias
    }
    assert expected.items() <= ALIASES.items()


@pytest.mark.parametrize(
    "key", ["reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"]
)
def test_the_defaults_we_write_are_deepspeeds(key: str) -> None:
    """Proves that a model without a hidden size gets the very values that DeepSpeed would have taken."""
    result = resolved({"zero_optimization": {"stage": 3, key: "auto"}})
    name = key.removeprefix("stage3_")
    assert get(result.config, f"zero_optimization.{key}") == getattr(DeepSpeedZeroConfig(), name)


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("name", PRESETS)
def test_deepspeed_accepts_every_preset(name: str, final: bool) -> None:
    """Proves that both passes give DeepSpeed a config that it reads as the strategy's name says."""
    sourced = compose(preset=name, nvme_path="/fast", environ={})
    read = SizedConfig(resolved(sourced, final=final, hidden_size=Fact(16, "module.net")).config, 2)
    assert read.zero_config.stage == int(name[4])
    assert read.bfloat16_config.enabled
    assert read.train_batch_size == read.train_micro_batch_size_per_gpu * read.gradient_accumulation_steps * 2
    assert (read.zero_config.offload_optimizer is not None) == ("_" in name)


def test_deepspeed_accepts_the_early_pass_that_knows_little() -> None:
    """Proves that zero.Init gets a readable config before loaders, accumulation and hidden size are known."""
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2}
    early = resolve_config(compose(config, preset="zero3", environ={}), RunFacts(), final=False)
    assert SizedConfig(early.config, 3).zero_config.stage == 3


def test_deepspeed_accepts_an_evaluation() -> None:
    """Proves that a training config whose numbers fit no test run is still read for one."""
    config = {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    result = resolve_config(config, RunFacts(purpose="evaluate", world_size=Fact(4, "Trainer(devices=4)")))
    assert SizedConfig(result.config, 4).train_micro_batch_size_per_gpu == 3


def test_deepspeed_refuses_what_it_removed() -> None:
    """Proves that keys which DeepSpeed removed reach it, so that its own explanation reaches the user."""
    with pytest.raises(DeepSpeedConfigError, match="AMP integration has been removed"):
        SizedConfig(resolved({"amp": {"enabled": True}}).config, 2)


@pytest.mark.parametrize("kind", [WarmupLR, WarmupDecayLR])
def test_deepspeed_refuses_no_warm_up(kind: Any) -> None:
    """Proves that warm-up 0, which we write as 1, is what DeepSpeed's schedulers refuse."""
    with pytest.raises(ValueError, match="warmup_num_steps must be a positive integer"):
        kind(None, **({"total_num_steps": 5} if kind is WarmupDecayLR else {}), warmup_num_steps=0)


PRECISIONS = ("32-true", "16-mixed", "16-true", "bf16-mixed", "bf16-true")
OTHER = {
    "gradient_clipping": lambda right: right + 0.5,
    "optimizer.params.lr": lambda right: right * 3,
    "optimizer.params.weight_decay": lambda right: right + 0.25,
    "scheduler.params.total_num_steps": lambda right: right + 1,
    "scheduler.params.warmup_num_steps": lambda right: right + 7,
    "gradient_accumulation_steps": lambda right: right + 1,
    "train_micro_batch_size_per_gpu": lambda right: right * 2,
    "train_batch_size": lambda right: right + 1,
    "fp16.enabled": lambda right: not right,
    "bf16.enabled": lambda right: not right,
}


@st.composite
def runs(draw: st.DrawFn) -> tuple[RunFacts, dict[str, Any], int]:
    """A run's facts, the value that each must-match key has to get by arithmetic of our own, and its processes."""
    processes, micro, steps = (draw(st.integers(1, 8)) for _ in range(3))
    precision = draw(st.sampled_from(PRECISIONS))
    clip = draw(st.sampled_from([0.1, 0.5, 1.0]))
    lr = draw(st.sampled_from([1e-5, 3e-4, 0.1, 1]))
    decay = draw(st.sampled_from([0.0, 0.01, 0.1]))
    total, warmup = draw(st.integers(1, 10_000)), draw(st.integers(1, 500))
    run = RunFacts(
        world_size=Fact(processes, "Trainer(devices)"),
        micro_batch_size=Fact(micro, "DataLoader.batch_size"),
        accumulate_grad_batches=Fact(steps, "Trainer(accumulate_grad_batches)"),
        precision=Fact(precision, "Trainer(precision)"),
        gradient_clip_val=Fact(clip, "Trainer(gradient_clip_val)"),
        learning_rate=Fact(lr, "module.hparams.lr"),
        weight_decay=Fact(decay, "module.hparams.weight_decay"),
        total_steps=Fact(total, "trainer.estimated_stepping_batches"),
        warmup_steps=Fact(warmup, "module.hparams.warmup_steps"),
        optimizer_from_code=False,
        scheduler_from_code=False,
        accelerator=draw(st.sampled_from(["cpu", "cuda"])),
        hidden_size=draw(st.none() | st.integers(1, 4096).map(lambda size: Fact(size, "module.net"))),
    )
    right = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "train_batch_size": micro * steps * processes,
        "gradient_clipping": clip,
        "optimizer.params.lr": lr,
        "optimizer.params.weight_decay": decay,
        "scheduler.params.total_num_steps": total,
        "scheduler.params.warmup_num_steps": warmup,
        "fp16.enabled": precision.startswith("16"),
        "bf16.enabled": precision.startswith("bf16"),
    }
    return run, right, processes


@st.composite
def configs(draw: st.DrawFn, right: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """A config in which each key is absent, "auto", right, right in a string, or wrong; and the keys that are wrong."""
    tree: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {}}, "scheduler": {"type": "WarmupDecayLR"}}
    tree["zero_optimization"] = {"stage": draw(st.integers(0, 3))}
    ways = ["absent", "auto", "right", "text"] + ["wrong"] * draw(st.integers(0, 1))
    wrong = set()
    for key, truth in right.items():
        how = draw(st.sampled_from(ways))
        if how == "wrong":
            wrong.add(key)
        value = {"auto": "auto", "right": truth, "text": str(truth), "wrong": OTHER[key](truth)}.get(how)
        if how != "absent":
            put(tree, key, value)
    for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "param_persistence_threshold"):
        if draw(st.booleans()):
            put(tree, f"zero_optimization.{key}", "auto")
    return tree, wrong


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_runs_and_configs(data: st.DataObject) -> None:
    """Proves that exactly the planted contradictions are reported, or DeepSpeed accepts a result without "auto"."""
    run, right, processes = data.draw(runs())
    config, wrong = data.draw(configs(right))
    both = all(str(get(config, f"{name}.enabled")) == "True" for name in ("fp16", "bf16"))
    if wrong:
        with pytest.raises(ConfigError) as caught:
            resolve_config(config, run)
        named = {line.partition(":")[0] for line in str(caught.value).splitlines()}
        expected = wrong - {"fp16.enabled", "bf16.enabled"} | {"fp16.enabled and bf16.enabled"} if both else wrong
        assert named == expected
        return
    result = resolve_config(config, run).config
    assert list(find_auto(result)) == []
    for key, truth in right.items():
        if get(config, key) is not get({}, "absent"):
            assert get(result, key) == truth
    read = SizedConfig(result, processes)
    assert read.train_batch_size == right["train_batch_size"]
    assert read.gradient_clipping == right["gradient_clipping"]
    assert (read.float16_config.enabled, read.bfloat16_config.enabled) == (right["fp16.enabled"], right["bf16.enabled"])
