"""Every row of the rules, in every way its key can stand in a config."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from lightning_zero.config.dotted import put
from lightning_zero.config.facts import Fact
from lightning_zero.config.rules import RULES
from tests.config.runs import ABSENT, resolved, said, value


class Row(NamedTuple):
    """One row of the table, told by hand: what the run says, what that makes of the key, and what contradicts it."""

    key: str
    run: dict[str, Any]
    filled: Any
    text: Any
    """The same value as a string, or None where the key holds no number or truth."""
    other: Any
    """A literal that differs from the run's value; it stays where the row only fills."""
    contradicts: bool
    absent: Any
    around: dict[str, Any] = {}  # noqa: RUF012 - a NamedTuple's default


TYPES = {"optimizer": "AdamW", "scheduler": "WarmupDecayLR"}
OFFLOAD = {"zero_optimization.offload_optimizer.device": "cpu"}
SGD = {"optimizer_from_code": True, "optimizer_has_cpu_version": Fact(False, "configure_optimizers -> SGD")}
ZERO3 = {"zero_optimization.stage": 3}
HIDDEN = {"hidden_size": Fact(64, "config.hidden_size of module.net")}

ROWS = [
    Row("train_micro_batch_size_per_gpu", {}, 8, "8", 2, True, 8),
    Row("gradient_accumulation_steps", {}, 4, "4", 2, True, 4),
    Row("train_batch_size", {}, 64, "6.4e1", 10, True, ABSENT),
    Row(
        "gradient_clipping",
        {"gradient_clip_val": Fact(0.1, "Trainer(gradient_clip_val=0.1)")},
        0.1,
        "1e-1",
        1,
        True,
        0.1,
    ),
    Row("optimizer.params.lr", {}, 1e-4, "1e-4", 3e-4, True, ABSENT),
    Row(
        "optimizer.params.betas",
        {"betas": Fact((0.9, 0.95), "hparams.betas")},
        [0.9, 0.95],
        None,
        [0.9, 0.9],
        True,
        ABSENT,
    ),
    Row("optimizer.params.eps", {"eps": Fact(1e-6, "hparams.eps")}, 1e-6, "1e-6", 1e-8, True, ABSENT),
    Row("optimizer.params.weight_decay", {"weight_decay": Fact(0.1, "hparams")}, 0.1, "0.1", 0, True, ABSENT),
    Row("scheduler.params.warmup_min_lr", {}, 0, "0", 1e-6, False, ABSENT),
    Row("scheduler.params.warmup_max_lr", {}, 1e-4, "0.0001", 1e-3, True, ABSENT),
    Row("scheduler.params.total_num_steps", {}, 1000, "1e3", 500, True, ABSENT),
    Row(
        "scheduler.params.warmup_num_steps",
        {"warmup_steps": Fact(50, "hparams.warmup_steps")},
        50,
        "50",
        5,
        True,
        ABSENT,
    ),
    Row(
        "fp16.enabled",
        {"precision": Fact("16-mixed", "Trainer(precision='16-mixed')")},
        True,
        "true",
        False,
        True,
        True,
    ),
    Row("bf16.enabled", {}, True, "True", False, True, True),
    Row("zero_optimization.reduce_bucket_size", HIDDEN, 4096, "4096", 500, False, ABSENT),
    Row("zero_optimization.stage3_prefetch_bucket_size", HIDDEN, 3686, "3686", 7, False, ABSENT, ZERO3),
    Row("zero_optimization.stage3_param_persistence_threshold", HIDDEN, 640, "640.0", 9, False, ABSENT, ZERO3),
    Row(
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        {"gathers_weights": Fact(True, "GatheredWeightsCheckpoint")},
        True,
        "true",
        False,
        True,
        True,
        ZERO3,
    ),
    Row("zero_allow_untested_optimizer", {"optimizer_from_code": True}, True, "true", False, False, True),
    Row("zero_force_ds_cpu_optimizer", SGD, False, "false", True, True, False, OFFLOAD),
    Row("steps_per_print", {}, None, None, 100, False, None),
]

by_key = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)


def holding(key: str, literal: Any) -> dict[str, Any]:
    """A config with one key, and with the type that its section needs if it is an optimizer's or a scheduler's."""
    tree: dict[str, Any] = {}
    section = key.partition(".")[0]
    if section in TYPES:
        put(tree, f"{section}.type", TYPES[section])
    put(tree, key, literal)
    return tree


def config(row: Row, *literal: Any) -> dict[str, Any]:
    """The row's surroundings, and its key with a literal if one is given."""
    tree = holding(row.key, literal[0]) if literal else {}
    for key, around in row.around.items():
        put(tree, key, around)
    return tree


def test_every_rule_has_a_row() -> None:
    """Proves that no rule is added without saying here what it does."""
    assert sorted(row.key for row in ROWS) == sorted(rule.key for rule in RULES)


@by_key
def test_auto_is_filled(row: Row) -> None:
    """Proves that "auto" becomes the run's value, and that its origin is no longer the config."""
    result = resolved(config(row, "auto"), **row.run)
    assert value(result, row.key) == row.filled
    assert type(value(result, row.key)) is type(row.filled)
    assert result.origins[row.key] not in ("config", "")


@by_key
def test_a_literal_that_matches_is_kept(row: Row) -> None:
    """Proves that a literal equal to the run's value passes, with the config as its origin."""
    if row.filled is None:
        literal, kept = row.other, row.other
    else:
        literal = kept = row.filled
    result = resolved(config(row, literal), **row.run)
    assert value(result, row.key) == kept
    assert result.origins[row.key] == "config"


@by_key
def test_a_literal_that_differs(row: Row) -> None:
    """Proves that a must-match key reports both values and both places, and that a fill-only key keeps the literal."""
    if not row.contradicts:
        assert value(resolved(config(row, row.other), **row.run), row.key) == row.other
        return
    (line,) = said(config(row, row.other), **row.run)
    assert line.startswith(f"{row.key}: config says ")
    assert " says " in line.removeprefix(f"{row.key}: config says ")
    assert len([sentence for sentence in line.split(". ") if sentence]) == 2


@pytest.mark.parametrize("row", [row for row in ROWS if row.text is not None], ids=lambda row: row.key)
def test_a_string_is_read(row: Row) -> None:
    """Proves that a number or a truth inside a string counts as itself, with the type that the key wants."""
    result = resolved(config(row, row.text), **row.run)
    assert value(result, row.key) == pytest.approx(row.filled)
    assert type(value(result, row.key)) is type(row.filled)


@by_key
def test_an_absent_key(row: Row) -> None:
    """Proves which keys are written although the config does not hold them."""
    assert value(resolved(config(row), **row.run), row.key) == row.absent


@pytest.mark.parametrize(
    ("key", "without", "expected"),
    [
        ("gradient_clipping", {}, 0.0),
        ("optimizer.params.betas", {}, [0.9, 0.999]),
        ("optimizer.params.eps", {}, 1e-8),
        ("optimizer.params.weight_decay", {}, 0.0),
        ("scheduler.params.warmup_num_steps", {}, 1),
        ("zero_optimization.reduce_bucket_size", {}, 500_000_000),
        ("gradient_accumulation_steps", {"accumulate_grad_batches": None}, 1),
        ("fp16.enabled", {}, False),
        ("zero_allow_untested_optimizer", {}, False),
    ],
)
def test_the_default_when_the_run_says_nothing(key: str, without: dict[str, Any], expected: Any) -> None:
    """Proves what "auto" becomes in the final pass when no flag, hyper-parameter or model decides."""
    assert value(resolved(holding(key, "auto"), **without), key) == expected


@pytest.mark.parametrize(
    ("key", "without", "remedy"),
    [
        ("train_micro_batch_size_per_gpu", {"micro_batch_size": None}, "micro_batch_size="),
        ("optimizer.params.lr", {"learning_rate": None}, r'auto={"optimizer.params.lr"'),
        ("scheduler.params.warmup_max_lr", {"learning_rate": None}, r'auto={"scheduler.params.warmup_max_lr"'),
        ("scheduler.params.total_num_steps", {"total_steps": None}, "max_steps"),
        ("train_batch_size", {"world_size": None}, "leave it out"),
    ],
)
def test_auto_that_nothing_supplies(key: str, without: dict[str, Any], remedy: str) -> None:
    """Proves that the final pass refuses an "auto" that stays open, and names the call that settles it."""
    (line,) = said(holding(key, "auto"), **without)
    assert line.startswith(f'{key}: config says "auto", and nothing supplies it. ')
    assert remedy in line


@pytest.mark.parametrize(
    "key",
    [
        "optimizer.params.lr",
        "optimizer.params.betas",
        "scheduler.params.warmup_max_lr",
        "scheduler.params.warmup_num_steps",
    ],
)
def test_the_auto_argument_comes_before_hyper_parameters(key: str) -> None:
    """Proves that the strategy's auto={...} decides optimizer and scheduler keys before the module does."""
    given: Any = [0.8, 0.99] if key.endswith("betas") else 3
    run = {"betas": Fact([0.5, 0.5], "hparams"), "warmup_steps": Fact(9, "hparams")}
    result = resolved(holding(key, "auto"), auto={key: given}, **run)
    assert value(result, key) == given
    assert result.origins[key] == f'auto["{key}"]'


def test_the_auto_argument_comes_after_the_flags() -> None:
    """Proves that auto={...} cannot replace what the loader says, and does fill in when no loader says anything."""
    config = {"train_micro_batch_size_per_gpu": "auto"}
    auto = {"train_micro_batch_size_per_gpu": 3}
    assert value(resolved(config, auto=auto), "train_micro_batch_size_per_gpu") == 8
    assert value(resolved(config, auto=auto, micro_batch_size=None), "train_micro_batch_size_per_gpu") == 3
