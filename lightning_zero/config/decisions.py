"""How a run's facts decide a key: the functions that the rows of the table name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from lightning_zero.config.dotted import MISSING, get, is_auto
from lightning_zero.config.facts import Fact, RunFacts

ACCUMULATION: Final = "gradient_accumulation_steps"
CPU_OPTIMIZER: Final = "zero_force_ds_cpu_optimizer"
LR: Final = "optimizer.params.lr"
MICRO: Final = "train_micro_batch_size_per_gpu"
TOTAL: Final = "train_batch_size"
TOTAL_STEPS: Final = "scheduler.params.total_num_steps"
WARMUP_LR: Final = "scheduler.params.warmup_max_lr"
WARMUP_STEPS: Final = "scheduler.params.warmup_num_steps"


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


Decide = Callable[[Run], "Fact[Any] | None"]
"""What a row asks of a run: the value with its origin, or None while it is not known."""


def data_parallel_size(run: Run) -> Fact[int] | None:
    """Processes that each see other data: the world, divided by tensor and sequence parallelism."""
    world = run.facts.world_size
    if world is None:
        return None
    tensor = run.literal("tensor_parallel.autotp_size") or 1
    sequence = run.literal("sequence_parallel_size") or 1
    return Fact(world.value // (max(tensor, 1) * max(sequence, 1)), world.origin)


def micro_batch(run: Run) -> Fact[int] | None:
    """The loader's batch size, or what a literal total leaves for one micro-batch of one process."""
    if run.facts.micro_batch_size is not None:
        return run.facts.micro_batch_size
    total, world, steps = run.literal(TOTAL), data_parallel_size(run), run.literal(ACCUMULATION)
    if run.facts.loop_accumulates and total is None and run.literal(MICRO) is None:
        return Fact(1, "Fabric (nothing depends on it)")
    if run.literal(MICRO) is not None or total is None or world is None or steps is None:
        return None
    share, rest = divmod(total, world.value * steps)
    if rest or not share:
        return None
    return Fact(share, f"{TOTAL} {total} / (accumulation {steps} x {_count(world.value)})")


def no_micro_batch(run: Run) -> Fact[int] | None:
    """1 where no loader tells, unless the user asked for the loader's by ``"auto"``; Fabric's loaders never tell."""
    asked = run.is_asked(MICRO) and run.facts.purpose == "fit" and not run.facts.loop_accumulates
    return None if asked else Fact(1, "default 1: no batch size is known")


def accumulation(run: Run) -> Fact[int] | None:
    """The Trainer's flag; under Fabric 1."""
    if run.facts.loop_accumulates:
        return Fact(1, "Fabric (the training loop decides)")
    return run.facts.accumulate_grad_batches


def total_batch(run: Run) -> Fact[int] | None:
    """Micro batch x accumulation x data-parallel processes, from the rows above."""
    micro, steps, world = run.literal(MICRO), run.literal(ACCUMULATION), data_parallel_size(run)
    if micro is None or steps is None or world is None:
        return None
    return Fact(
        micro * steps * world.value,
        f"micro batch {micro} x accumulation {steps} x {_count(world.value)}",
    )


def _count(processes: int) -> str:
    return f"{processes} process{'' if processes == 1 else 'es'}"


def clipping(run: Run) -> Fact[float] | None:
    """The Trainer's flag; under Fabric the strategy's argument."""
    return run.facts.gradient_clip_val


def no_clipping(run: Run) -> Fact[float]:
    """Zero, since DeepSpeed's own default clips."""
    return Fact(0.0, "Fabric (clip_gradients)" if run.facts.loop_accumulates else "no gradient clipping is asked for")


def no_weight_decay(run: Run) -> Fact[float]:
    """Zero."""
    return Fact(0.0, "default 0.0, as in the Transformers Trainer (torch's AdamW has 0.01)")


def warmup_lr(run: Run) -> Fact[Any] | None:
    """The learning rate of the optimizer, wherever that comes from: one for all groups, or a list."""
    groups = run.facts.optimizer_lrs
    if run.facts.optimizer_from_code and groups is not None and len(groups.value):
        lrs = list(groups.value)
        return Fact(lrs[0] if all(lr == lrs[0] for lr in lrs) else lrs, groups.origin)
    literal = run.literal(LR)
    if literal is not None:
        return Fact(literal, LR)
    return run.supplied(LR) or run.facts.learning_rate


def total_steps(run: Run) -> Fact[int] | None:
    """The number of updates, when it is finite."""
    steps = run.facts.total_steps
    return Fact(int(steps.value), steps.origin) if steps is not None and math.isfinite(steps.value) else None


def warmup_steps(run: Run) -> Fact[int] | None:
    """Updates of warm-up, at least 1; below 1 it is a share of all updates, rounded up."""
    steps = run.supplied(WARMUP_STEPS) or run.facts.warmup_steps
    if steps is None:
        return None
    number = float(steps.value)
    if number >= 1 or number <= 0:
        return Fact(max(1, int(number)), steps.origin)
    total = run.literal(TOTAL_STEPS)
    known = Fact(total, "total_num_steps") if total is not None else total_steps(run)
    if known is None:
        return None
    # A share of the updates, rounded up; the subtraction forgives the float noise in 0.07 * 100.
    return Fact(max(1, math.ceil(number * known.value - 1e-9)), f"{steps.origin}, {number:g} of {known.value} updates")


def is_precision(*names: str) -> Decide:
    """Whether the run's precision is one of some."""

    def decide(run: Run) -> Fact[bool] | None:
        precision = run.facts.precision
        return None if precision is None else Fact(precision.value in names, precision.origin)

    return decide


def from_hidden(formula: Callable[[int], int]) -> Decide:
    """A number of elements made from the hidden size."""

    def decide(run: Run) -> Fact[int] | None:
        hidden = run.supplied("hidden_size") or run.facts.hidden_size
        return None if hidden is None else Fact(formula(int(hidden.value)), f"{hidden.origin} = {hidden.value}")

    return decide


def of_deepspeed(value: Any, reason: str = "no hidden size found") -> Decide:
    """DeepSpeed's own default, written out."""
    return lambda run: Fact(value, f"DeepSpeed default: {reason}")


def optimizer_from_code(run: Run) -> Fact[bool] | None:
    """True when it does, else not decided."""
    return Fact(True, "the optimizer comes from code") if run.facts.optimizer_from_code else None


def cpu_optimizer(run: Run) -> Fact[bool] | None:
    """Whether DeepSpeed's CPU version steps an offloaded optimizer from code; not decided without offload."""
    has_version = run.facts.optimizer_has_cpu_version
    if not run.offloads_optimizer or not run.facts.optimizer_from_code or has_version is None:
        return None
    # A version that exists is DeepSpeed's default, and a literal false still keeps the user's own optimizer.
    if has_version.value and run.literal(CPU_OPTIMIZER) is not None:
        return None
    return has_version


def gathers_weights(run: Run) -> Fact[bool] | None:
    """True when a callback needs whole weights, else not decided."""
    fact = run.facts.gathers_weights
    return fact if fact is not None and fact.value else None


def no_warmup(run: Run) -> Fact[int] | None:
    """One update, unless a share of an unknown number is asked for."""
    steps = run.supplied(WARMUP_STEPS) or run.facts.warmup_steps
    return Fact(1, "default 0, written 1: DeepSpeed refuses 0") if steps is None else None
