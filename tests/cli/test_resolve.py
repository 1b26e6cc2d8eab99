"""`lightning-zero resolve` and `presets`: what a run would give DeepSpeed, before it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_zero.cli.main import main
from lightning_zero.config.presets import PRESETS
from tests.harness import ranks
from tests.models import Regression, loader, trainer

CONFIGS = Path(__file__).parents[2] / "configs"
Captured = pytest.CaptureFixture[str]


def resolved(capsys: Captured, *words: str, code: int = 0) -> Any:
    """The JSON that `resolve` prints."""
    capsys.readouterr()
    assert main(["resolve", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_by_class_path(capsys: Captured) -> None:
    """A config in the YAML is filled from the file's own flags; what the model and the loader decide is left open."""
    found = resolved(capsys, "--config", str(CONFIGS / "fit_zero3.yaml"), "--trainer.accelerator", "cpu")
    assert found["config"] == {
        "zero_optimization": {"stage": 3, "overlap_comm": True, "stage3_gather_16bit_weights_on_model_save": True},
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }
    origins = found["origins"]
    assert origins["gradient_accumulation_steps"] == "Trainer(accumulate_grad_batches=2)"
    assert origins["zero_optimization.stage3_gather_16bit_weights_on_model_save"].startswith("Trainer(callbacks=[Gath")
    assert origins["zero_optimization.overlap_comm"] == "config"
    assert set(found["later"]) == {
        "train_micro_batch_size_per_gpu",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
    }


def test_by_name_and_from_the_command_line(capsys: Captured) -> None:
    """A name resolves to its preset; overrides of nested keys arrive from the command line in every spelling."""
    words = ["--config", str(CONFIGS / "fit_zero2.yaml"), "--trainer.accelerator", "cpu"]
    found = resolved(capsys, *words, "--trainer.accumulate_grad_batches", "4")
    assert found["config"]["zero_optimization"]["stage"] == 2
    assert found["origins"]["zero_optimization.stage"] == "preset zero2"
    assert found["config"]["gradient_accumulation_steps"] == 4

    offload = ["--config", str(CONFIGS / "fit_zero3_offload.yaml"), "--trainer.accelerator", "cpu"]
    found = resolved(capsys, *offload)
    assert found["config"]["zero_optimization"]["sub_group_size"] == 100_000_000
    assert "zero_force_ds_cpu_optimizer" in found["later"]
    key = "zero_optimization.reduce_bucket_size"
    for ways in (
        [f"--trainer.strategy.init_args.overrides.{key}", "5e7"],
        [f"--trainer.strategy.overrides.{key}", "5e7"],
        ["--trainer.strategy.overrides", f'{{"{key}": 5e7}}'],
        ["--trainer.strategy.overrides.zero_optimization", "{reduce_bucket_size: 5e7}"],
        ["--trainer.strategy.overrides.gradient_clipping", "1", f"--trainer.strategy.overrides.{key}", "5e7"],
    ):
        found = resolved(capsys, *offload, *ways)
        assert found["config"]["zero_optimization"]["reduce_bucket_size"] == 50_000_000, ways
        assert found["origins"][key] == "overrides"
        assert key not in found["later"]


def test_what_is_left_open(capsys: Captured) -> None:
    """Each key that only the run can decide is named, and none that is decided already."""
    Path("ds.json").write_text(
        json.dumps(
            {
                "zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": "auto"},
                "train_batch_size": 64,
                "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
                "scheduler": {
                    "type": "WarmupDecayLR",
                    "params": {"total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_max_lr": "auto"},
                },
            }
        )
    )
    Path("run.yaml").write_text(
        "model: examples.lm.ByteLlama\n"
        "trainer:\n"
        "  accelerator: cpu\n"
        "  logger: false\n"
        "  strategy: {class_path: lightning_zero.ZeroStrategy, init_args: {config: ds.json}}\n"
    )
    found = resolved(capsys, "--config", "run.yaml")
    assert set(found["later"]) == {
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
        "scheduler.params.total_num_steps",
    }
    assert found["config"]["optimizer"]["params"] == {"lr": 2e-3}  # the model's hyper-parameters
    assert found["config"]["scheduler"]["params"] == {"warmup_num_steps": 20, "warmup_max_lr": 2e-3}
    assert "zero_allow_untested_optimizer" not in found["config"]
    assert "stage3_prefetch_bucket_size" not in found["config"]["zero_optimization"]

    found = resolved(capsys, "--config", "run.yaml", "--trainer.strategy.micro_batch_size", "64")
    assert set(found["later"]) == {"scheduler.params.total_num_steps"}
    assert found["config"]["train_batch_size"] == found["config"]["train_micro_batch_size_per_gpu"] == 64


def test_contradictions(capsys: Captured) -> None:
    """Every contradiction stands in one message with exit code 2, for machines too."""
    words = ["--config", str(CONFIGS / "fit_zero3.yaml"), "--trainer.accelerator", "cpu"]
    wrong = [
        *("--trainer.strategy.overrides.gradient_clipping", "0.5"),
        *("--trainer.strategy.overrides.gradient_accumulation_steps", "8"),
    ]
    errors = resolved(capsys, *words, *wrong, code=2)["errors"]
    assert [error.partition(":")[0] for error in errors] == ["gradient_accumulation_steps", "gradient_clipping"]
    assert errors[1].startswith("gradient_clipping: overrides says 0.5, Trainer(gradient_clip_val=1.0) says 1.0.")
    assert main(["resolve", *words, *wrong]) == 2
    captured = capsys.readouterr()
    assert "lightning-zero resolve: gradient_accumulation_steps: overrides says 8" in captured.err
    assert captured.out == ""


def test_other_strategies_have_nothing_to_resolve(capsys: Captured) -> None:
    """A strategy that is none of ours is refused by its name."""
    words = ["resolve", "--config", str(CONFIGS / "fit_zero2.yaml"), "--trainer.accelerator", "cpu"]
    assert main([*words, "--trainer.strategy", "ddp"]) == 2
    assert "trainer.strategy: is DDPStrategy, which has no DeepSpeed config" in capsys.readouterr().err


def test_the_table(capsys: Captured) -> None:
    """For people there are two tables: what is known with its origin, and what is not with what decides it."""
    assert main(["resolve", "--config", str(CONFIGS / "fit_zero2.yaml"), "--trainer.accelerator", "cpu"]) == 0
    known, _, open_ = capsys.readouterr().out.partition("known when training starts")
    assert "│ gradient_clipping" in known
    assert "Trainer(gradient_clip_val=1.0)" in known
    assert "train_micro_batch_size_per_gpu" not in known
    assert "the batch size of the training loader" in open_


@ranks(1)
def test_it_is_what_the_run_uses() -> None:
    """What is foreseen is what the run then resolves, and all that it leaves open is filled by the run."""
    from lightning_zero import ZeroStrategy
    from lightning_zero.strategies.foresight import foresee_fit

    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu"}},
    }
    flags: dict[str, Any] = {"devices": 1, "gradient_clip_val": 0.5, "max_steps": 1}
    foreseen = foresee_fit(trainer(ZeroStrategy(config=config), **flags), Regression())
    run = trainer(ZeroStrategy(config=config), **flags)
    run.fit(Regression(), loader(ranks=1))
    used = dict(run.strategy.resolved.origins)
    assert {key for key in used if key not in foreseen.resolved.origins} == set(foreseen.later)
    assert {key: used[key] for key in foreseen.resolved.origins} == foreseen.resolved.origins


def test_presets(capsys: Captured) -> None:
    """`presets` lists the names, `presets NAME` prints the shipped file as it is, and a misspelt one is refused."""
    assert main(["presets"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(PRESETS)
    assert main(["presets", "zero3_offload"]) == 0
    assert capsys.readouterr().out == (CONFIGS / "deepspeed" / "zero3_offload.json").read_text()
    assert main(["presets", "zero3_ofload"]) == 2
    assert 'write "zero3_offload"' in capsys.readouterr().err
