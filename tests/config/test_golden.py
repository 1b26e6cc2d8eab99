"""Whole configs, resolved under ordinary runs, against what was written out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_zero.config.facts import Fact
from lightning_zero.config.sources import compose
from tests.config.runs import resolved

BATCH = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}
FROM_CODE = {"gradient_clipping": 0.0, "zero_allow_untested_optimizer": True, "steps_per_print": None}
CPU = {"device": "cpu", "pin_memory": True}
NVME = {"device": "nvme", "nvme_path": "/fast", "pin_memory": True}
STAGE_2 = {
    "stage": 2,
    "overlap_comm": True,
    "allgather_bucket_size": 200_000_000,
    "reduce_bucket_size": 200_000_000,
    "contiguous_gradients": True,
}
STAGE_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_bucket_size": 10_000,
    "stage3_prefetch_bucket_size": 9_000,
    "stage3_param_persistence_threshold": 1_000,
    "stage3_gather_16bit_weights_on_model_save": True,
}

PRESETS = {
    "zero1": {"stage": 1},
    "zero1_offload": {"stage": 1, "offload_optimizer": CPU},
    "zero2": STAGE_2,
    "zero2_offload": {**STAGE_2, "offload_optimizer": CPU},
    "zero3": STAGE_3,
    "zero3_offload": {**STAGE_3, "offload_optimizer": CPU, "offload_param": CPU},
    "zero3_nvme": {**STAGE_3, "offload_optimizer": NVME, "offload_param": NVME},
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_strategy_name_alone(name: str) -> None:
    """Proves what each strategy name gives a bf16 run with an optimizer from code and a hidden size of 100."""
    result = resolved(
        compose(preset=name, nvme_path="/fast" if "nvme" in name else None, environ={}),
        accelerator="cuda",
        optimizer_from_code=True,
        optimizer_has_cpu_version=Fact(True, "configure_optimizers -> AdamW"),
        hidden_size=Fact(100, "module.net.config.hidden_size"),
    )
    swapped = {"zero_force_ds_cpu_optimizer": True} if "_" in name else {}
    assert result.config == {
        **BATCH,
        **FROM_CODE,
        **swapped,
        "bf16": {"enabled": True},
        "zero_optimization": PRESETS[name],
    }
    assert result.notes == ()


def test_a_config_that_works_under_the_transformers_trainer() -> None:
    """Proves that the smallest config of a Transformers user works as it stands, its stage from the strategy's name."""
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "fp16": {"enabled": "auto"},
    }
    half = Fact("16-mixed", "Trainer(precision='16-mixed')")
    result = resolved(compose(config, preset="zero1", environ={}), precision=half)
    assert result.config == {
        **BATCH,
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": False},
        "fp16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }


def test_optimizer_and_scheduler_sections() -> None:
    """Proves that AdamW and WarmupDecayLR are filled from hyper-parameters and the run's length."""
    config = {
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
        },
    }
    result = resolved(
        config,
        learning_rate=Fact("3e-4", "module.hparams.learning_rate"),
        betas=Fact((0.9, 0.95), "module.hparams.adam_beta1 and adam_beta2"),
        weight_decay=Fact(0.1, "module.hparams.weight_decay"),
        warmup_steps=Fact(0.03, "module.hparams.warmup_ratio"),
        gradient_clip_val=Fact(1, "Trainer(gradient_clip_val=1)"),
    )
    assert result.config == {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1,
        "steps_per_print": None,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 1000, "warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 30},
        },
    }
    assert {key: result.origins[key] for key in result.origins if key.startswith("scheduler.params")} == {
        "scheduler.params.total_num_steps": "trainer.estimated_stepping_batches",
        "scheduler.params.warmup_min_lr": "default 0",
        "scheduler.params.warmup_max_lr": "optimizer.params.lr",
        "scheduler.params.warmup_num_steps": "module.hparams.warmup_ratio, 0.03 of 1000 updates",
    }


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupLR", {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 1}),
        ("WarmupCosineLR", {"total_num_steps": 1000, "warmup_num_steps": 1}),
    ],
)
def test_other_schedulers(kind: str, params: dict[str, Any]) -> None:
    """Proves that each of DeepSpeed's warm-up schedulers gets its own keys filled, and no other."""
    config = {"scheduler": {"type": kind, "params": dict.fromkeys(params, "auto")}}
    assert resolved(config).config["scheduler"] == {"type": kind, "params": params}


@pytest.mark.parametrize("kind", ["Lamb", "Lion", "Adagrad", "Muon", "Adam"])
def test_other_optimizers(kind: str) -> None:
    """Proves that the type does not matter to what is filled."""
    config = {"optimizer": {"type": kind, "params": {"lr": "auto", "weight_decay": "auto"}}}
    assert resolved(config).config["optimizer"] == {"type": kind, "params": {"lr": 1e-4, "weight_decay": 0.0}}


def test_a_result_is_a_config_again() -> None:
    """Proves that a resolved config, written beside a run's logs, can be given as config= to the same run."""
    first = resolved(compose(preset="zero3", environ={}), optimizer_from_code=True)
    assert resolved(first.config, optimizer_from_code=True).config == first.config
