"""The resolver: passes, contradictions, what is left over, and the field cases."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from lightning_zero.config.facts import Fact, RunFacts
from lightning_zero.config.resolve import resolve_config
from lightning_zero.config.sources import compose
from lightning_zero.errors import ConfigError
from tests.config.runs import ABSENT, facts, resolved, said, value

LOSS_SCALED = Fact("16-mixed", "Trainer(precision='16-mixed')")
FULL = Fact("32-true", "Trainer(precision='32-true')")
BRAIN = Fact("bf16-mixed", "Trainer(precision='bf16-mixed')")


@pytest.mark.parametrize("steps", [4, "auto", "4", 4.0])
def test_equal_accumulation_is_accepted(steps: Any) -> None:
    """Proves that accumulation in config and Trainer may stand in both when they agree (K1)."""
    assert value(resolved({"gradient_accumulation_steps": steps}), "gradient_accumulation_steps") == 4


def test_different_accumulation_is_refused() -> None:
    """Proves that 2 in the config against 4 in the Trainer is an error with both places (K1)."""
    (line,) = said({"gradient_accumulation_steps": 2})
    assert line == (
        "gradient_accumulation_steps: config says 2, Trainer(accumulate_grad_batches=4) says 4. "
        'Write "auto" there, or pass accumulate_grad_batches with the same number.'
    )


def test_the_users_dict_is_not_edited() -> None:
    """Proves that one dict given to two runs resolves for each, and is unchanged, inner lists too (K1)."""
    config = {
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": ["0.9", 0.95]}},
        "zero_optimization": {"prefetch_bucket_size": "auto", "stage": "3"},
    }
    before = copy.deepcopy(config)
    first = resolved(config, accumulate_grad_batches=Fact(2, "Trainer(accumulate_grad_batches=2)"))
    first.config["optimizer"]["params"]["betas"].append(1)
    second = resolved(config)
    assert config == before
    assert [value(result, "gradient_accumulation_steps") for result in (first, second)] == [2, 4]
    assert value(second, "optimizer.params.betas") == [0.9, 0.95]


def test_a_sourced_config_resolves_afresh_for_every_run() -> None:
    """Proves that a second fit with other flags starts from the user's words and not from the first result."""
    sourced = compose({"gradient_clipping": 1}, preset="zero3", environ={})
    resolved(sourced)
    again = resolved(sourced, micro_batch_size=Fact(2, "DataLoader.batch_size"), precision=FULL)
    assert again.origins["gradient_clipping"] == "config (the run says nothing)"
    assert value(again, "train_batch_size") == 16
    assert value(again, "bf16.enabled") is False


@pytest.mark.parametrize("config", [{}, "preset"])
def test_an_unknown_batch_size_is_one_with_a_note(config: Any) -> None:
    """Proves that ready-made batches need no batch size: DeepSpeed is told 1, and the user is told (K2)."""
    sourced = compose(preset="zero2", environ={}) if config == "preset" else config
    result = resolved(sourced, micro_batch_size=None)
    assert value(result, "train_micro_batch_size_per_gpu") == 1
    assert [note for note in result.notes if "micro_batch_size=" in note]


def test_an_explicit_micro_batch_wins() -> None:
    """Proves that the strategy's argument decides where no loader does, without a note (K2, K3)."""
    result = resolved({}, micro_batch_size=Fact(5, "micro_batch_size=5"))
    assert value(result, "train_micro_batch_size_per_gpu") == 5
    assert result.origins["train_micro_batch_size_per_gpu"] == "micro_batch_size=5"
    assert result.notes == ()


def test_a_micro_batch_that_differs_from_the_loader() -> None:
    """Proves that 2 in the config against batches of 8 is a contradiction and no silent choice (K4)."""
    (line,) = said({"train_micro_batch_size_per_gpu": 2})
    assert "config says 2, DataLoader.batch_size says 8. " in line


def test_four_contradictions_stand_in_one_error() -> None:
    """Proves that lr, clipping, micro batch and total batch are all reported at once, a line each (K5)."""
    lines = said(
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "gradient_clipping": 1.0,
            "train_micro_batch_size_per_gpu": 4,
            "train_batch_size": 32,
        },
        gradient_clip_val=Fact(0.5, "Trainer(gradient_clip_val=0.5)"),
    )
    assert sorted(line.partition(":")[0] for line in lines) == [
        "gradient_clipping",
        "optimizer.params.lr",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
    ]


def test_five_contradictions_of_the_early_pass() -> None:
    """Proves that what the flags alone decide is raised before the model: five lines, both values, places, remedies."""
    lines = said(
        {
            "gradient_accumulation_steps": 2,
            "train_micro_batch_size_per_gpu": "4",
            "train_batch_size": 10,
            "gradient_clipping": 1.0,
            "fp16": {"enabled": True},
        },
        final=False,
        gradient_clip_val=Fact(0.1, "Trainer(gradient_clip_val=0.1)"),
    )
    assert lines == [
        (
            "gradient_accumulation_steps: config says 2, Trainer(accumulate_grad_batches=4) says 4. "
            'Write "auto" there, or pass accumulate_grad_batches with the same number.'
        ),
        (
            "train_micro_batch_size_per_gpu: config says 4, DataLoader.batch_size says 8. "
            'Write "auto" there, or make the two equal.'
        ),
        (
            "train_batch_size: config says 10, micro batch 8 x accumulation 4 x 2 processes says 64. "
            'Write "auto" there, or change one of the factors.'
        ),
        (
            "gradient_clipping: config says 1.0, Trainer(gradient_clip_val=0.1) says 0.1. "
            'Write "auto" there, or pass gradient_clip_val (in Fabric gradient_clipping) with the same number.'
        ),
        (
            "fp16.enabled: config says true, Trainer(precision='bf16-mixed') says false. "
            'Write "auto" there, or pass the precision that it means ("16-mixed" or "16-true" for fp16).'
        ),
    ]


def scheduled(total: Any, warmup: Any = 10) -> dict[str, Any]:
    """A config with a WarmupDecayLR section."""
    params = {"total_num_steps": total, "warmup_num_steps": warmup, "warmup_max_lr": 1e-4, "warmup_min_lr": 0}
    return {"scheduler": {"type": "WarmupDecayLR", "params": params}}


def test_the_number_of_updates() -> None:
    """Proves what becomes of a literal, an "auto", and either in a run of unknown length (K6)."""
    unknown = Fact(math.inf, "trainer.estimated_stepping_batches")
    assert value(resolved(scheduled("auto")), "scheduler.params.total_num_steps") == 1000
    assert value(resolved(scheduled(400), total_steps=unknown), "scheduler.params.total_num_steps") == 400
    (line,) = said(scheduled("auto"), total_steps=unknown)
    assert "set the Trainer's max_steps, or write a number there; for Fabric" in line
    (line,) = said(scheduled(400))
    assert "config says 400, trainer.estimated_stepping_batches says 1000" in line


@pytest.mark.parametrize(
    ("hparam", "total", "expected"),
    [
        (0, 1000, 1),
        (1, 1000, 1),
        (1000, 1000, 1000),
        (0.1, 1000, 100),
        (0.0101, 1000, 11),
        (0.07, 100, 7),  # 0.07 * 100 is 7.000000000000001
        (0.0001, 1000, 1),
        ("0.5", 1000, 500),
    ],
)
def test_warm_up_from_hyper_parameters(hparam: Any, total: int, expected: int) -> None:
    """Proves warm-up 0 and 1, warm-up equal to the total, and a ratio of the updates rounded up (O4)."""
    result = resolved(
        scheduled("auto", "auto"),
        warmup_steps=Fact(hparam, "module.hparams.warmup_steps"),
        total_steps=Fact(total, "trainer.estimated_stepping_batches"),
    )
    assert value(result, "scheduler.params.warmup_num_steps") == expected


def test_a_warm_up_ratio_needs_a_length() -> None:
    """Proves that a ratio of a run of unknown length is refused, with the way out (O4)."""
    ratio = Fact(0.1, "module.hparams.warmup_ratio")
    lines = said(scheduled(None, "auto"), warmup_steps=ratio, total_steps=None)
    assert [line for line in lines if line.startswith("scheduler.params.warmup_num_steps") and "max_steps" in line]


def test_a_literal_warm_up_of_zero_is_written_one() -> None:
    """Proves that 0, which DeepSpeed refuses, becomes 1, and that a fraction is no number of updates (O4)."""
    assert value(resolved(scheduled("auto", 0)), "scheduler.params.warmup_num_steps") == 1
    (line,) = said(scheduled("auto", 0.1))
    assert line == "scheduler.params.warmup_num_steps: config says 0.1. Write a whole number of at least 1 there."


@pytest.mark.parametrize(
    ("run", "bucket", "origin"),
    [
        ({"hidden_size": Fact(512, "hidden_sizes of module.net")}, 262144, "hidden_sizes of module.net = 512"),
        ({"auto": {"hidden_size": "32"}}, 1024, 'auto["hidden_size"] = 32'),
        ({"auto": {"hidden_size": 32}, "hidden_size": Fact(512, "module.net")}, 1024, 'auto["hidden_size"] = 32'),
        ({}, 500_000_000, "DeepSpeed default: no hidden size found"),
    ],
)
def test_the_hidden_size(run: dict[str, Any], bucket: int, origin: str) -> None:
    """Proves where the bucket sizes come from, and that a model without a hidden size keeps DeepSpeed's (K7)."""
    result = resolved({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}, **run)
    assert value(result, "zero_optimization.reduce_bucket_size") == bucket
    assert result.origins["zero_optimization.reduce_bucket_size"] == origin


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stage_3_keys_below_stage_3(stage: int, final: bool) -> None:
    """Proves that a config that was cut down from stage 3 works: its open stage-3 keys are left out (K8)."""
    zero = {
        "stage": stage,
        "stage3_prefetch_bucket_size": "auto",
        "param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "stage3_max_live_parameters": 10,
    }
    result = resolved({"zero_optimization": zero}, final=final, hidden_size=Fact(8, "module.net"))
    assert result.config["zero_optimization"] == {"stage": stage, "stage3_max_live_parameters": 10}
    assert {key for key in result.origins if key.startswith("zero_optimization")} == {
        "zero_optimization.stage",
        "zero_optimization.stage3_max_live_parameters",
    }


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize(
    ("config", "path", "near"),
    [
        ({"wholly_new_thing": "auto"}, "wholly_new_thing", None),
        ({"wandb": {"team": "auto"}}, "wandb.team", None),
        ({"optimizer": {"type": "AdamW", "params": {"betas": ["auto", 0.9]}}}, "optimizer.params.betas[0]", "betas"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "buffer_count": "auto"}}},
            "zero_optimization.offload_optimizer.buffer_count",
            None,
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": "auto"}}},
            "zero_optimization.offload_param.pin_memory",
            None,
        ),
        ({"zero_optimization": {"sub_group_size": "auto"}}, "zero_optimization.sub_group_size", "bucket_size"),
        (
            {"optimizer": {"type": "Muon", "params": {"muon_lr": "auto"}}},
            "optimizer.params.muon_lr",
            "optimizer.params.lr",
        ),
    ],
)
def test_auto_where_nothing_fills_it(config: dict[str, Any], path: str, near: str | None, final: bool) -> None:
    """Proves that "auto" in an unknown key, a list or a nested block is an error with its path, in both passes (K9)."""
    (line,) = said(config, final=final, accelerator="cpu")
    assert line.startswith(f'{path}: config says "auto", and nothing supplies it. ')
    assert "the nearest key that a run fills is" in line
    assert near is None or near in line.rpartition(" is ")[2]


def test_the_auto_argument_fills_any_key() -> None:
    """Proves that auto={...} settles an "auto" that no rule knows."""
    config = {"optimizer": {"type": "Muon", "params": {"muon_lr": "auto", "lr": "auto"}}}
    result = resolved(config, auto={"optimizer.params.muon_lr": "2e-2"})
    assert value(result, "optimizer.params.muon_lr") == 0.02
    assert value(result, "optimizer.params.lr") == 1e-4


def test_the_auto_argument_is_spelt_and_used() -> None:
    """Proves that a misspelt key in auto={...} is an error, and one without a place in the config is remarked on."""
    (line,) = said({}, auto={"optimizer.params.weight_decy": 0.1})
    assert line.endswith('Write "optimizer.params.weight_decay".')
    (line,) = said({}, auto={"hidden_size": "wide"})
    assert line == 'auto["hidden_size"]: says "wide". Write a whole number of at least 1 there.'
    (note,) = resolved({}, auto={"optimizer.params.lr": 0.1, "hidden_size": 8}).notes
    assert note.startswith('auto["optimizer.params.lr"]: is not used')


@pytest.mark.parametrize(
    "config",
    [
        {"data_types": {"keep_in_fp32_modules": "auto"}},
        {
            "zero_optimization": {
                "zenflow": {"select_strategy": "auto", "select_interval": "auto", "update_interval": "auto"}
            }
        },
        {"pipeline": {"stages": "auto"}},
        {"expert_parallel": {"ep_size": "auto"}},
    ],
)
def test_auto_that_deepspeed_understands(config: dict[str, Any]) -> None:
    """Proves that DeepSpeed's own "auto" values reach it."""
    (section,) = config
    result = resolved(config)
    for key, entry in config[section].items():
        assert result.config[section][key] == entry


def test_the_total_batch_shows_its_arithmetic() -> None:
    """Proves that a total of 10 over 2 processes and batches of 4 is explained by its factors (K10)."""
    one = Fact(1, "Trainer(accumulate_grad_batches=1)")
    four = Fact(4, "DataLoader.batch_size")
    (line,) = said({"train_batch_size": 10}, micro_batch_size=four, accumulate_grad_batches=one)
    assert line == (
        "train_batch_size: config says 10, micro batch 4 x accumulation 1 x 2 processes says 8. "
        'Write "auto" there, or change one of the factors.'
    )


@pytest.mark.parametrize(
    ("config", "total"),
    [
        ({"tensor_parallel": {"autotp_size": "2"}}, 2 * 8 * 4),
        ({"sequence_parallel_size": 2}, 2 * 8 * 4),
        ({"sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 2}}, 8 * 4),
        ({}, 4 * 8 * 4),
    ],
)
def test_parallel_processes_that_see_the_same_data(config: dict[str, Any], total: int) -> None:
    """Proves that tensor and sequence parallelism divide the processes that the total batch counts."""
    world = Fact(4, "Trainer(devices=4)")
    assert value(resolved({**config, "train_batch_size": "auto"}, world_size=world), "train_batch_size") == total


def test_parallel_sizes_divide_the_world() -> None:
    """Proves that a parallel size that does not divide the processes is refused."""
    (line,) = said({"sequence_parallel_size": 3})
    assert line.startswith("sequence_parallel_size says 3 in config, which does not divide the 2 processes of ")
    both = {"sequence_parallel_size": 4, "tensor_parallel": {"autotp_size": 2}, "train_batch_size": "auto"}
    (line,) = said(both, world_size=Fact(4, "Trainer(devices=4)"))
    assert line.startswith("tensor_parallel.autotp_size says 2 and sequence_parallel_size says 4 in config")


def test_the_micro_batch_follows_from_a_total() -> None:
    """Proves that a literal total supplies the micro batch that no loader tells, when it divides."""
    config = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": "auto"}
    result = resolved(config, micro_batch_size=None)
    assert value(result, "train_micro_batch_size_per_gpu") == 3
    (line,) = said({**config, "train_batch_size": 25}, micro_batch_size=None)
    assert line.startswith('train_micro_batch_size_per_gpu: config says "auto", and nothing supplies it. ')


ABSENT_SECTION = object()


@pytest.mark.parametrize("precision", [FULL, LOSS_SCALED, BRAIN], ids=lambda fact: fact.value)
@pytest.mark.parametrize("enabled", [ABSENT_SECTION, False, True, "auto"])
@pytest.mark.parametrize("section", ["fp16", "bf16"])
def test_precision(section: str, enabled: Any, precision: Fact[str]) -> None:
    """Proves the whole matrix of fp16 and bf16 sections and Lightning's precision (K13)."""
    config = {} if enabled is ABSENT_SECTION else {section: {"enabled": enabled}}
    wanted = {"fp16": "16-mixed", "bf16": "bf16-mixed"}[section] == precision.value
    if enabled in (True, False) and enabled is not wanted:
        (line,) = said(config, precision=precision)
        assert line.startswith(f"{section}.enabled: config says {str(enabled).lower()}, {precision.origin} says ")
        return
    result = resolved(config, precision=precision)
    assert (value(result, f"{section}.enabled") is True) is wanted
    others = [name for name in ("fp16", "bf16") if value(result, f"{name}.enabled") is True]
    assert others == {"32-true": [], "16-mixed": ["fp16"], "bf16-mixed": ["bf16"]}[precision.value]


@pytest.mark.parametrize("precision", [FULL, LOSS_SCALED, BRAIN], ids=lambda fact: fact.value)
def test_both_precisions(precision: Fact[str]) -> None:
    """Proves that fp16 and bf16 both true are one error of their own, whatever the Trainer says (K13)."""
    (line,) = said({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, precision=precision)
    assert line.startswith("fp16.enabled and bf16.enabled: config says true for both. ")


def test_other_keys_of_a_precision_section_stay() -> None:
    """Proves that a section without "enabled" is filled and keeps its other keys."""
    result = resolved({"fp16": {"initial_scale_power": "12"}}, precision=LOSS_SCALED)
    assert result.config["fp16"] == {"initial_scale_power": 12, "enabled": True}


@pytest.mark.parametrize(("flag", "expected"), [(None, 0.0), (Fact(0.0, "Trainer(gradient_clip_val=0.0)"), 0.0)])
def test_no_clipping_unless_it_is_asked_for(flag: Fact[float] | None, expected: float) -> None:
    """Proves that DeepSpeed's own default of 1.0 never applies behind the user's back."""
    assert value(resolved({}, gradient_clip_val=flag), "gradient_clipping") == expected


def test_a_literal_clipping_without_the_flag_holds() -> None:
    """Proves that clipping in the config alone works, and that its origin says that the flag is not set."""
    result = resolved({"gradient_clipping": "1.0"})
    assert value(result, "gradient_clipping") == 1.0
    assert result.origins["gradient_clipping"] == "config (the run says nothing)"
    (line,) = said({"gradient_clipping": 1.0}, gradient_clip_val=Fact(0.0, "Trainer(gradient_clip_val=0.0)"))
    assert "config says 1.0, Trainer(gradient_clip_val=0.0) says 0.0" in line


def test_clipping_by_value_is_refused() -> None:
    """Proves that clipping by value, which DeepSpeed cannot do, is an error only when clipping is on (A3)."""
    clip = Fact(0.1, "Trainer(gradient_clip_val=0.1)")
    (line,) = said({}, gradient_clip_val=clip, gradient_clip_algorithm="value")
    assert line.endswith('Pass gradient_clip_algorithm="norm", or leave gradient_clip_val out.')
    assert value(resolved({}, gradient_clip_algorithm="value"), "gradient_clipping") == 0.0


@pytest.mark.parametrize(("literal", "fails"), [("auto", False), (1, False), ("1", False), (4, True)])
def test_accumulation_under_fabric(literal: Any, fails: bool) -> None:
    """Proves that under Fabric the loop decides: 1 is written, and another literal is an error that says so."""
    run = {"loop_accumulates": True, "accumulate_grad_batches": None}
    config = {"gradient_accumulation_steps": literal}
    if fails:
        (line,) = said(config, **run)
        assert "says 4, and under Fabric the training loop decides." in line
        assert "fabric.no_backward_sync" in line
    else:
        assert value(resolved(config, **run), "gradient_accumulation_steps") == 1


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize(
    "config",
    [{"optimizer": {}}, {"optimizer": {"params": {"lr": 1}}}, {"scheduler": {}}, {"scheduler": {"params": {}}}],
)
def test_a_section_without_a_type(config: dict[str, Any], final: bool) -> None:
    """Proves that a section that DeepSpeed would ignore is an error, since the run would train at another rate."""
    (line,) = said(config, final, learning_rate=None)
    (section,) = config
    assert line.startswith(f"{section}: config has a section without a type. Write ")
    assert resolved(config, purpose="evaluate").config.keys().isdisjoint(config)


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_two_places_for_one_thing(section: str) -> None:
    """Proves that an optimizer, or a scheduler, from both the config and the code is an error (O3)."""
    kind = {"optimizer": "AdamW", "scheduler": "WarmupLR"}[section]
    (line,) = said({section: {"type": kind, "params": {}}}, **{f"{section}_from_code": True})
    assert line.startswith(f'{section}: config has a section for "{kind}", and the code gives ')


def test_the_mixes_of_section_and_code() -> None:
    """Proves that a scheduler section may go with an optimizer from code, whose learning rates it takes (O3)."""
    config = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}}
    code = {"optimizer_from_code": True, "learning_rate": Fact(9.0, "module.hparams.lr")}
    same = resolved(config, optimizer_lrs=Fact([0.1, 0.1], "configure_optimizers"), **code)
    differ = resolved(config, optimizer_lrs=Fact([0.1, 0.2], "configure_optimizers"), **code)
    assert value(same, "scheduler.params.warmup_max_lr") == 0.1
    assert value(differ, "scheduler.params.warmup_max_lr") == [0.1, 0.2]
    assert differ.origins["scheduler.params.warmup_max_lr"] == "configure_optimizers"


def test_the_peak_follows_a_literal_learning_rate() -> None:
    """Proves that warm-up ends at the learning rate that the optimizer section itself says."""
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": "3e-4"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
    }
    result = resolved(config, learning_rate=None)
    assert value(result, "scheduler.params.warmup_max_lr") == 3e-4
    assert result.origins["scheduler.params.warmup_max_lr"] == "optimizer.params.lr"


def offloaded(flag: Any) -> dict[str, Any]:
    """A config with optimizer offload, and the CPU optimizer flag where it is not ABSENT."""
    config: dict[str, Any] = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    return config if flag is ABSENT else {**config, "zero_force_ds_cpu_optimizer": flag}


@pytest.mark.parametrize(
    ("has_version", "flag", "expected"),
    [
        (True, ABSENT, True),
        (True, "auto", True),
        (True, True, True),
        (True, False, False),
        (False, ABSENT, False),
        (False, "auto", False),
        (False, False, False),
    ],
)
def test_the_cpu_optimizer(has_version: bool, flag: Any, expected: bool) -> None:
    """Proves who steps an offloaded optimizer from code, by what DeepSpeed has and by what the config says (O1)."""
    version = Fact(has_version, "configure_optimizers -> Some")
    result = resolved(offloaded(flag), optimizer_from_code=True, optimizer_has_cpu_version=version)
    assert value(result, "zero_force_ds_cpu_optimizer") is expected
    assert bool([note for note in result.notes if "no CPU version" in note]) is not has_version


def test_a_cpu_optimizer_that_there_is_not() -> None:
    """Proves that a literal true beside an optimizer without a CPU version is an error (O1)."""
    version = Fact(False, "configure_optimizers -> SGD")
    (line,) = said(offloaded(True), optimizer_from_code=True, optimizer_has_cpu_version=version)
    assert "config says true, configure_optimizers -> SGD says false" in line


@pytest.mark.parametrize("run", [{}, {"optimizer_from_code": True, "optimizer_has_cpu_version": Fact(True, "Adam")}])
def test_no_cpu_optimizer_without_offload(run: dict[str, Any]) -> None:
    """Proves that the flag is not written where it means nothing."""
    assert value(resolved({}, **run), "zero_force_ds_cpu_optimizer") is ABSENT


@pytest.mark.parametrize(("accelerator", "expected"), [("cpu", False), ("cuda", True), (None, True)])
def test_pinned_memory(accelerator: Any, expected: bool) -> None:
    """Proves that pinned memory is off on CPU, also where the config is silent, and that it is said."""
    result = resolved(compose(preset="zero3_offload", environ={}), accelerator=accelerator)
    for section in ("offload_optimizer", "offload_param"):
        key = f"zero_optimization.{section}.pin_memory"
        assert value(result, key) is expected
        assert ("pinned memory needs an accelerator" in result.origins[key]) is not expected
    bare = resolved(offloaded(ABSENT), accelerator=accelerator)
    pinned = value(bare, "zero_optimization.offload_optimizer.pin_memory")
    assert pinned is (ABSENT if expected else False)


@pytest.mark.parametrize(("stage", "fails"), [(2, False), (3, True)])
def test_a_callback_that_gathers_against_a_config_that_forbids_it(stage: int, fails: bool) -> None:
    """Proves that forbidding the gathering beside such a callback is an error before training, at stage 3 only."""
    config = {"zero_optimization": {"stage": stage, "gather_16bit_weights_on_model_save": False}}
    run = {"gathers_weights": Fact(True, "GatheredWeightsCheckpoint")}
    if fails:
        (line,) = said(config, final=False, **run)
        assert line.endswith("Leave the key out, or remove the callback.")
    else:
        resolved(config, final=False, **run)


def test_the_early_pass_leaves_open_keys_out() -> None:
    """Proves that zero.Init sees nothing open: what is decided later is left out, and a batch size is held in place."""
    config = {
        **scheduled("auto", "auto"),
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
        "bf16": {"enabled": "auto"},
        "zero_allow_untested_optimizer": "auto",
        "zero_force_ds_cpu_optimizer": "auto",
    }
    result = resolved(config, final=False, micro_batch_size=None, total_steps=None, optimizer_from_code=None)
    assert result.config == {
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 1e-4, "warmup_min_lr": 0}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 4,
        "steps_per_print": None,
    }
    assert result.origins["train_micro_batch_size_per_gpu"] == "placeholder until the loaders are known"


def test_the_early_pass_does_not_judge_what_is_not_known() -> None:
    """Proves that literals which the run cannot judge yet pass the early pass."""
    config = {**scheduled(7, 3), "train_batch_size": 10, "zero_force_ds_cpu_optimizer": True}
    early = RunFacts(precision=FULL)
    assert "train_batch_size" not in resolve_config(config, early, final=False).config


def test_evaluation_drops_the_training_sections() -> None:
    """Proves that validate, test and predict need no optimizer, no steps and no loader."""
    config = {
        **scheduled("auto", "auto"),
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "train_batch_size": 7,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    result = resolve_config(config, RunFacts(purpose="evaluate", precision=BRAIN))
    assert result.config == {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "steps_per_print": None,
    }
    assert set(result.origins) == {
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "zero_optimization.stage",
        "bf16.enabled",
        "steps_per_print",
    }
    assert result.notes == ()


def test_evaluation_writes_no_training_key() -> None:
    """Proves that a config that says nothing gets nothing for a test run but what DeepSpeed insists on."""
    run = facts(purpose="evaluate", optimizer_from_code=True, gradient_clip_val=Fact(0.1, "Trainer"))
    assert resolve_config({}, run).config == {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "steps_per_print": None,
    }


def test_evaluation_compares_no_training_key() -> None:
    """Proves that a test run with other loaders and flags raises nothing about training, but does about precision."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0}},
    }
    clip = Fact(0.1, "Trainer(gradient_clip_val=0.1)")
    run = facts(purpose="evaluate", gradient_clip_val=clip, gradient_clip_algorithm="value", optimizer_from_code=True)
    result = resolve_config(config, run)
    assert value(result, "train_micro_batch_size_per_gpu") == 2
    (line,) = said({"fp16": {"enabled": True}}, purpose="evaluate")
    assert line.startswith("fp16.enabled: ")


def test_a_fact_that_is_no_number() -> None:
    """Proves that a hyper-parameter that cannot be read is named with its place, and a numeric string is read."""
    config = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    assert value(resolved(config, learning_rate=Fact("3e-4", "module.hparams.lr")), "optimizer.params.lr") == 3e-4
    (line,) = said(config, learning_rate=Fact("high", "module.hparams.lr"))
    assert line == 'learning_rate: module.hparams.lr says "high". Write a number there.'


def test_every_value_has_an_origin() -> None:
    """Proves that a whole config says of each value where it came from, in the words of the place."""
    config = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-7}}, "wall_clock_breakdown": True}
    sourced = compose(config, preset="zero3", overrides={"zero_optimization.sub_group_size": 5}, environ={})
    result = resolved(sourced, hidden_size=Fact(4, "module.net.config.hidden_size"))
    assert {key: result.origins[key] for key in ("wall_clock_breakdown", "optimizer.params.eps")} == {
        "wall_clock_breakdown": "config",
        "optimizer.params.eps": "config",
    }
    assert result.origins["zero_optimization.stage"] == "preset zero3"
    assert result.origins["zero_optimization.sub_group_size"] == "overrides"
    assert result.origins["optimizer.params.lr"] == "module.hparams.lr"
    assert result.origins["zero_optimization.reduce_bucket_size"] == "module.net.config.hidden_size = 4"
    assert result.origins["gradient_accumulation_steps"] == "Trainer(accumulate_grad_batches=4)"


def test_what_a_result_says_of_itself() -> None:
    """Proves that stage and offload can be asked of a result without knowing DeepSpeed's keys."""
    result = resolved(compose(preset="zero3", offload_optimizer="cpu", environ={}))
    assert (result.stage, result.offload_optimizer, result.offload_param) == (3, "cpu", "none")


def test_an_error_is_a_value_error() -> None:
    """Proves that a caller may catch the builtin."""
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        resolve_config({"gradient_accumulation_steps": 2}, facts())
    assert issubclass(ConfigError, ValueError)
