"""The rules, one row a key: how a run's facts decide it, whether a literal must match, and the remedy.

``docs/auto.md`` is made from this table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal

from lightning_zero.config.dotted import MISSING, get, is_auto
from lightning_zero.config.facts import Fact, RunFacts

__all__ = ["RULES", "Absent", "Rule", "Run"]

_ACCUMULATION: Final = "gradient_accumulation_steps"
_CPU_OPTIMIZER: Final = "zero_force_ds_cpu_optimizer"
_LR: Final = "optimizer.params.lr"
_MICRO: Final = "train_micro_batch_size_per_gpu"
_TOTAL: Final = "train_batch_size"
_WARMUP_LR: Final = "scheduler.params.warmup_max_lr"


@dataclass(frozen=True)
class Run:
    """What a row's functions look at: the facts, and the config as the rows above have left it."""

    facts: RunFacts
    values: Mapping[str, Any]
    origins: Mapping[str, str]

    def literal(self, key: str) -> Any:
        """The value of a key that is there and not ``"auto"``, else None."""
        value = get(self.values, key)
        return None if value is MISSING or is_auto(value) else value

    def supplied(self, key: str) -> Fact[Any] | None:
        """What the strategy's ``auto={...}`` holds for a key."""
        return Fact(self.facts.auto[key], f'auto["{key}"]') if key in self.facts.auto else None

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return int(self.literal("zero_optimization.stage") or 0)

    def is_asked(self, key: str) -> bool:
        """Whether the user's own config, not a preset, says ``"auto"`` at a key."""
        return is_auto(get(self.values, key)) and not self.origins.get(key, "").startswith("preset ")

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer states live in CPU memory or on NVMe."""
        return self.literal("zero_optimization.offload_optimizer.device") in ("cpu", "nvme")


class Absent(Enum):
    """What happens to a key that the config does not hold."""

    LEAVE = "stays out"
    WRITE = "written"
    WRITE_TRUE = "written when true"
    WRITE_KNOWN = "written when the run decides it"


Decide = Callable[[Run], "Fact[Any] | None"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of the table."""

    key: str
    """DeepSpeed's dotted key."""

    value: str
    """What it becomes, for the docs."""

    reads: str
    """Where the value is read, for the docs."""

    decide: Decide
    """The run's value and its origin; None while it is not known."""

    default: Decide | None = None
    """The value of the final pass when nothing decides; None for no default."""

    default_note: str = ""
    """What the user is told when the default is taken."""

    unset: str = ""
    """What is added to the origin of a literal that holds because the run says nothing."""

    match: bool = True
    """Whether a literal that differs from the run's value is a contradiction; else the row only fills ``"auto"``."""

    remedy: str = 'Write "auto" there, or make the two equal.'
    """What to do about a contradiction."""

    missing: str = ""
    """What to do when the key says ``"auto"`` and nothing supplies a value."""

    absent: Absent = Absent.LEAVE
    """What happens when the config does not hold the key."""

    since: Literal["early", "final"] = "early"
    """The first pass that decides the key: before the model is built, or when model, optimizer and steps exist."""

    supplied_first: bool = False
    """Whether the strategy's ``auto={...}`` comes before what the run says, and not only after it."""

    training: bool = True
    """Whether the key concerns training only, so that evaluation compares nothing."""

    from_stage: int = 0
    """The lowest stage at which ``"auto"`` is filled; below it the key is dropped."""


def data_parallel_size(run: Run) -> Fact[int] | None:
    """Processes that each see other data: the world, divided by tensor and sequence parallelism."""
    world = run.facts.world_size
    if world is None:
        return None
    tensor = run.literal("tensor_parallel.autotp_size") or 1
    sequence = run.literal("sequence_parallel_size") or 1
    return Fact(world.value // (max(tensor, 1) * max(sequence, 1)), world.origin)


def _micro_batch(run: Run) -> Fact[int] | None:
    if run.facts.micro_batch_size is not None:
        return run.facts.micro_batch_size
    total, world, steps = run.literal(_TOTAL), data_parallel_size(run), run.literal(_ACCUMULATION)
    if run.literal(_MICRO) is not None or total is None or world is None or steps is None:
        return None
    share, rest = divmod(total, world.value * steps)
    if rest or not share:
        return None
    return Fact(share, f"{_TOTAL} {total} / (accumulation {steps} x {_count(world.value)})")


def _no_micro_batch(run: Run) -> Fact[int] | None:
    return None if run.is_asked(_MICRO) and run.facts.purpose == "fit" else Fact(1, "default 1: no batch size is known")


def _accumulation(run: Run) -> Fact[int] | None:
    if run.facts.loop_accumulates:
        return Fact(1, "Fabric (the training loop decides)")
    return run.facts.accumulate_grad_batches


def _total_batch(run: Run) -> Fact[int] | None:
    micro, steps, world = run.literal(_MICRO), run.literal(_ACCUMULATION), data_parallel_size(run)
    if micro is None or steps is None or world is None:
        return None
    return Fact(
        micro * steps * world.value,
        f"micro batch {micro} x accumulation {steps} x {_count(world.value)}",
    )


def _count(processes: int) -> str:
    return f"{processes} process{'' if processes == 1 else 'es'}"


def _clipping(run: Run) -> Fact[float] | None:
    return run.facts.gradient_clip_val


def _no_clipping(run: Run) -> Fact[float]:
    return Fact(0.0, "no gradient clipping is asked for")


def _weight_decay(run: Run) -> Fact[float]:
    return Fact(0.0, "default 0.0, as in the Transformers Trainer (torch's AdamW has 0.01)")


def _warmup_lr(run: Run) -> Fact[Any] | None:
    groups = run.facts.optimizer_lrs
    if run.facts.optimizer_from_code and groups is not None and len(groups.value):
        lrs = list(groups.value)
        return Fact(lrs[0] if all(lr == lrs[0] for lr in lrs) else lrs, groups.origin)
    literal = run.literal(_LR)
    if literal is not None:
        return Fact(literal, _LR)
    return run.supplied(_LR) or run.facts.learning_rate


def _total_steps(run: Run) -> Fact[int] | None:
    steps = run.facts.total_steps
    return Fact(int(steps.value), steps.origin) if steps is not None and math.isfinite(steps.value) else None


def _warmup_steps(run: Run) -> Fact[int] | None:
    steps = run.supplied("scheduler.params.warmup_num_steps") or run.facts.warmup_steps
    if steps is None:
        return None
    number = float(steps.value)
    if number >= 1 or number <= 0:
        return Fact(max(1, int(number)), steps.origin)
    total = run.literal("scheduler.params.total_num_steps")
    known = Fact(total, "total_num_steps") if total is not None else _total_steps(run)
    if known is None:
        return None
    # A share of the updates, rounded up; the subtraction forgives the float noise in 0.07 * 100.
    return Fact(max(1, math.ceil(number * known.value - 1e-9)), f"{steps.origin}, {number:g} of {known.value} updates")


def _is_precision(*names: str) -> Decide:
    def decide(run: Run) -> Fact[bool] | None:
        precision = run.facts.precision
        return None if precision is None else Fact(precision.value in names, precision.origin)

    return decide


def _from_hidden(formula: Callable[[int], int]) -> Decide:
    def decide(run: Run) -> Fact[int] | None:
        hidden = run.supplied("hidden_size") or run.facts.hidden_size
        return None if hidden is None else Fact(formula(int(hidden.value)), f"{hidden.origin} = {hidden.value}")

    return decide


def _of_deepspeed(value: Any, reason: str = "no hidden size found") -> Decide:
    return lambda run: Fact(value, f"DeepSpeed default: {reason}")


def _optimizer_from_code(run: Run) -> Fact[bool] | None:
    return Fact(True, "the optimizer comes from code") if run.facts.optimizer_from_code else None


def _cpu_optimizer(run: Run) -> Fact[bool] | None:
    has_version = run.facts.optimizer_has_cpu_version
    if not run.offloads_optimizer or not run.facts.optimizer_from_code or has_version is None:
        return None
    # A version that exists is DeepSpeed's default, and a literal false still keeps the user's own optimizer.
    if has_version.value and run.literal(_CPU_OPTIMIZER) is not None:
        return None
    return has_version


RULES: Final[tuple[Rule, ...]] = (
    Rule(
        key=_ACCUMULATION,
        value="micro-batches in one update",
        reads="`Trainer(accumulate_grad_batches)`; under Fabric 1, the loop decides",
        decide=_accumulation,
        default=_of_deepspeed(1, "one micro-batch is one update"),
        remedy='Write "auto" there, or pass accumulate_grad_batches with the same number.',
        absent=Absent.WRITE,
    ),
    Rule(
        key=_MICRO,
        value="batch size of the training loader; the largest of several",
        reads="`micro_batch_size` of the strategy, else the loader's batch sampler, else its `batch_size`",
        decide=_micro_batch,
        default=_no_micro_batch,
        default_note="train_micro_batch_size_per_gpu: no loader tells its batch size, so DeepSpeed is told 1. "
        "Pass micro_batch_size=... to the strategy.",
        missing="Pass micro_batch_size=... to the strategy, or give the loader a batch_size.",
        absent=Absent.WRITE,
    ),
    Rule(
        key=_TOTAL,
        value="micro batch x accumulation x data-parallel processes",
        reads="the two rows above and `num_nodes * num_devices`, divided by tensor and sequence parallelism",
        decide=_total_batch,
        remedy='Write "auto" there, or change one of the factors.',
        missing="Write a number there, or leave it out.",
    ),
    Rule(
        key="gradient_clipping",
        value="largest gradient norm; 0.0 when the flag is not set (DeepSpeed's own default is 1.0)",
        reads="`Trainer(gradient_clip_val)`, by norm only; a literal holds when the flag is not set",
        decide=_clipping,
        default=_no_clipping,
        unset="gradient_clip_val is not set",
        remedy='Write "auto" there, or pass gradient_clip_val with the same number.',
        absent=Absent.WRITE,
    ),
    Rule(
        key=_LR,
        value="learning rate",
        reads="`lr`, then `learning_rate`, on the LightningModule or its hyper-parameters",
        decide=lambda run: run.facts.learning_rate,
        missing='Set self.lr or save_hyperparameters() with lr, or pass auto={"optimizer.params.lr": ...}.',
        supplied_first=True,
    ),
    Rule(
        key="optimizer.params.betas",
        value="`[beta1, beta2]`; default `[0.9, 0.999]`",
        reads="hyper-parameter `betas`, or `adam_beta1` and `adam_beta2`",
        decide=lambda run: run.facts.betas,
        default=lambda run: Fact([0.9, 0.999], "default [0.9, 0.999]"),
        supplied_first=True,
    ),
    Rule(
        key="optimizer.params.eps",
        value="epsilon; default 1e-8",
        reads="hyper-parameter `eps` or `adam_epsilon`",
        decide=lambda run: run.facts.eps,
        default=lambda run: Fact(1e-8, "default 1e-8"),
        supplied_first=True,
    ),
    Rule(
        key="optimizer.params.weight_decay",
        value="weight decay; default 0.0, as in the Transformers Trainer (torch's AdamW has 0.01)",
        reads="hyper-parameter `weight_decay`",
        decide=lambda run: run.facts.weight_decay,
        default=_weight_decay,
        supplied_first=True,
    ),
    Rule(
        key="scheduler.params.warmup_min_lr",
        value="0",
        reads="",
        decide=lambda run: Fact(0, "default 0"),
        match=False,
    ),
    Rule(
        key=_WARMUP_LR,
        value="learning rate at the end of warm-up; a list when an optimizer from code has groups that differ",
        reads="the optimizer of `configure_optimizers`, else as `optimizer.params.lr`",
        decide=_warmup_lr,
        missing='Set self.lr or save_hyperparameters() with lr, or pass auto={"scheduler.params.warmup_max_lr": ...}.',
        since="final",
        supplied_first=True,
    ),
    Rule(
        key="scheduler.params.total_num_steps",
        value="updates in the whole run",
        reads="`trainer.estimated_stepping_batches`",
        decide=_total_steps,
        remedy='Write "auto" there, or set max_steps to the same number.',
        missing="The run's length is not known: set max_steps, or write a number there.",
        since="final",
    ),
    Rule(
        key="scheduler.params.warmup_num_steps",
        value="updates of warm-up, at least 1 (DeepSpeed refuses 0)",
        reads="hyper-parameter `warmup_steps` (below 1: a share of all updates) or `warmup_ratio`",
        decide=_warmup_steps,
        default=lambda run: Fact(1, "default 0, written 1: DeepSpeed refuses 0") if not _wants_share(run) else None,
        missing="It is a share of a run whose length is not known: set max_steps, or write a number of updates.",
        since="final",
        supplied_first=True,
    ),
    Rule(
        key="fp16.enabled",
        value="whether precision is `16-mixed` or `16-true`",
        reads="`Trainer(precision)`",
        decide=_is_precision("16-mixed", "16-true"),
        default=_of_deepspeed(False, "no precision is asked for"),
        remedy='Write "auto" there, or pass the precision that it means ("16-mixed" or "16-true" for fp16).',
        absent=Absent.WRITE_TRUE,
        training=False,
    ),
    Rule(
        key="bf16.enabled",
        value="whether precision is `bf16-mixed` or `bf16-true`",
        reads="`Trainer(precision)`",
        decide=_is_precision("bf16-mixed", "bf16-true"),
        default=_of_deepspeed(False, "no precision is asked for"),
        remedy='Write "auto" there, or pass the precision that it means ("bf16-mixed" or "bf16-true" for bf16).',
        absent=Absent.WRITE_TRUE,
        training=False,
    ),
    Rule(
        key="zero_optimization.reduce_bucket_size",
        value="hidden * hidden; without a hidden size DeepSpeed's default, 5e8",
        reads='`auto={"hidden_size": n}`, else the largest hidden size of a transformers model in the module',
        decide=_from_hidden(lambda hidden: hidden * hidden),
        default=_of_deepspeed(500_000_000),
        match=False,
        training=False,
    ),
    Rule(
        key="zero_optimization.stage3_prefetch_bucket_size",
        value="int(0.9 * hidden * hidden); without a hidden size DeepSpeed's default, 5e7",
        reads="as above",
        decide=_from_hidden(lambda hidden: int(0.9 * hidden * hidden)),
        default=_of_deepspeed(50_000_000),
        match=False,
        training=False,
        from_stage=3,
    ),
    Rule(
        key="zero_optimization.stage3_param_persistence_threshold",
        value="10 * hidden; without a hidden size DeepSpeed's default, 1e5",
        reads="as above",
        decide=_from_hidden(lambda hidden: 10 * hidden),
        default=_of_deepspeed(100_000),
        match=False,
        training=False,
        from_stage=3,
    ),
    Rule(
        key="zero_optimization.stage3_gather_16bit_weights_on_model_save",
        value="true when a callback writes whole weights",
        reads="the callbacks",
        decide=lambda run: run.facts.gathers_weights if _is_true(run.facts.gathers_weights) else None,
        default=_of_deepspeed(False, "no callback writes whole weights"),
        remedy="Leave the key out, or remove the callback.",
        absent=Absent.WRITE_TRUE,
        from_stage=3,
    ),
    Rule(
        key="zero_allow_untested_optimizer",
        value="true when the optimizer comes from code",
        reads="`configure_optimizers`",
        decide=_optimizer_from_code,
        default=_of_deepspeed(False, "the optimizer is DeepSpeed's"),
        match=False,
        absent=Absent.WRITE_TRUE,
        since="final",
    ),
    Rule(
        key=_CPU_OPTIMIZER,
        value="with optimizer offload: true swaps the optimizer from code for DeepSpeed's CPU version, false keeps it; "
        "false when there is no such version",
        reads="`configure_optimizers`",
        decide=_cpu_optimizer,
        default=_of_deepspeed(True, "it concerns optimizer offload"),
        remedy="Leave the key out or write false, or return an optimizer that DeepSpeed has for the CPU (Adam, AdamW).",
        absent=Absent.WRITE_KNOWN,
        since="final",
    ),
    Rule(
        key="steps_per_print",
        value="null: DeepSpeed prints no progress of its own",
        reads="",
        decide=lambda run: Fact(None, "default: quiet"),
        match=False,
        absent=Absent.WRITE,
        training=False,
    ),
)
"""The table, in the order in which the rows are applied: a row may read what those above it have written."""


def _is_true(fact: Fact[bool] | None) -> bool:
    return fact is not None and fact.value


def _wants_share(run: Run) -> bool:
    steps = run.supplied("scheduler.params.warmup_num_steps") or run.facts.warmup_steps
    return steps is not None and 0 < float(steps.value) < 1
