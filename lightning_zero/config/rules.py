"""The rules, one row a key: how a run's facts decide it, whether a literal must match, and the remedy.

``docs/auto.md`` is made from this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from lightning_zero.config import decisions
from lightning_zero.config.decisions import Decide, from_hidden, is_precision, of_deepspeed
from lightning_zero.config.facts import Fact

__all__ = ["RULES", "Absent", "Rule"]


class Absent(Enum):
    """What happens to a key that the config does not hold."""

    LEAVE = "stays out"
    WRITE = "written"
    WRITE_TRUE = "written when true"
    WRITE_KNOWN = "written when the run decides it"


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


RULES: Final[tuple[Rule, ...]] = (
    Rule(
        key=decisions.ACCUMULATION,
        value="micro-batches in one update",
        reads="`Trainer(accumulate_grad_batches)`; under Fabric 1, the loop decides",
        decide=decisions.accumulation,
        default=of_deepspeed(1, "one micro-batch is one update"),
        remedy='Write "auto" there, or pass accumulate_grad_batches with the same number.',
        absent=Absent.WRITE,
    ),
    Rule(
        key=decisions.MICRO,
        value="batch size of the training loader; the largest of several",
        reads="`micro_batch_size` of the strategy, else the loader's batch sampler, else its `batch_size`",
        decide=decisions.micro_batch,
        default=decisions.no_micro_batch,
        default_note="train_micro_batch_size_per_gpu: no loader tells its batch size, so DeepSpeed is told 1. "
        "Pass micro_batch_size=... to the strategy.",
        missing="Pass micro_batch_size=... to the strategy, or give the loader a batch_size.",
        absent=Absent.WRITE,
    ),
    Rule(
        key=decisions.TOTAL,
        value="micro batch x accumulation x data-parallel processes",
        reads="the two rows above and `num_nodes * num_devices`, divided by tensor and sequence parallelism",
        decide=decisions.total_batch,
        remedy='Write "auto" there, or change one of the factors.',
        missing="Write a number there, or leave it out.",
    ),
    Rule(
        key="gradient_clipping",
        value="largest gradient norm; 0.0 when the flag is not set (DeepSpeed's own default is 1.0)",
        reads="`Trainer(gradient_clip_val)`, by norm only; `FabricZeroStrategy(gradient_clipping)`; a literal holds "
        "when neither is set",
        decide=decisions.clipping,
        default=decisions.no_clipping,
        unset="the run says nothing",
        remedy='Write "auto" there, or pass gradient_clip_val (in Fabric gradient_clipping) with the same number.',
        absent=Absent.WRITE,
    ),
    Rule(
        key=decisions.LR,
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
        default=decisions.no_weight_decay,
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
        key=decisions.WARMUP_LR,
        value="learning rate at the end of warm-up; a list when an optimizer from code has groups that differ",
        reads="the optimizer of `configure_optimizers`, else as `optimizer.params.lr`",
        decide=decisions.warmup_lr,
        missing='Set self.lr or save_hyperparameters() with lr, or pass auto={"scheduler.params.warmup_max_lr": ...}.',
        since="final",
        supplied_first=True,
    ),
    Rule(
        key=decisions.TOTAL_STEPS,
        value="updates in the whole run",
        reads="`trainer.estimated_stepping_batches`",
        decide=decisions.total_steps,
        remedy='Write "auto" there, or set max_steps to the same number.',
        missing="The run's length is not known: set the Trainer's max_steps, or write a number there; for Fabric pass "
        'auto={"scheduler.params.total_num_steps": ...}.',
        since="final",
    ),
    Rule(
        key=decisions.WARMUP_STEPS,
        value="updates of warm-up, at least 1 (DeepSpeed refuses 0)",
        reads="hyper-parameter `warmup_steps` (below 1: a share of all updates) or `warmup_ratio`",
        decide=decisions.warmup_steps,
        default=decisions.no_warmup,
        missing="It is a share of a run whose length is not known: set max_steps, or write a number of updates.",
        since="final",
        supplied_first=True,
    ),
    Rule(
        key="fp16.enabled",
        value="whether precision is `16-mixed` or `16-true`",
        reads="`Trainer(precision)`",
        decide=is_precision("16-mixed", "16-true"),
        default=of_deepspeed(False, "no precision is asked for"),
        remedy='Write "auto" there, or pass the precision that it means ("16-mixed" or "16-true" for fp16).',
        absent=Absent.WRITE_TRUE,
        training=False,
    ),
    Rule(
        key="bf16.enabled",
        value="whether precision is `bf16-mixed` or `bf16-true`",
        reads="`Trainer(precision)`",
        decide=is_precision("bf16-mixed", "bf16-true"),
        default=of_deepspeed(False, "no precision is asked for"),
        remedy='Write "auto" there, or pass the precision that it means ("bf16-mixed" or "bf16-true" for bf16).',
        absent=Absent.WRITE_TRUE,
        training=False,
    ),
    Rule(
        key="zero_optimization.reduce_bucket_size",
        value="hidden * hidden; without a hidden size DeepSpeed's default, 5e8",
        reads='`auto={"hidden_size": n}`, else the largest hidden size of a transformers model in the module',
        decide=from_hidden(lambda hidden: hidden * hidden),
        default=of_deepspeed(500_000_000),
        match=False,
        training=False,
    ),
    Rule(
        key="zero_optimization.stage3_prefetch_bucket_size",
        value="int(0.9 * hidden * hidden); without a hidden size DeepSpeed's default, 5e7",
        reads="as above",
        decide=from_hidden(lambda hidden: int(0.9 * hidden * hidden)),
        default=of_deepspeed(50_000_000),
        match=False,
        training=False,
        from_stage=3,
    ),
    Rule(
        key="zero_optimization.stage3_param_persistence_threshold",
        value="10 * hidden; without a hidden size DeepSpeed's default, 1e5",
        reads="as above",
        decide=from_hidden(lambda hidden: 10 * hidden),
        default=of_deepspeed(100_000),
        match=False,
        training=False,
        from_stage=3,
    ),
    Rule(
        key="zero_optimization.stage3_gather_16bit_weights_on_model_save",
        value="true when a callback writes whole weights",
        reads="the callbacks",
        decide=decisions.gathers_weights,
        default=of_deepspeed(False, "no callback writes whole weights"),
        remedy="Leave the key out, or remove the callback.",
        absent=Absent.WRITE_TRUE,
        from_stage=3,
    ),
    Rule(
        key="zero_allow_untested_optimizer",
        value="true when the optimizer comes from code",
        reads="`configure_optimizers`",
        decide=decisions.optimizer_from_code,
        default=of_deepspeed(False, "the optimizer is DeepSpeed's"),
        match=False,
        absent=Absent.WRITE_TRUE,
        since="final",
    ),
    Rule(
        key=decisions.CPU_OPTIMIZER,
        value="with optimizer offload: true swaps the optimizer from code for DeepSpeed's CPU version, false keeps it; "
        "false when there is no such version",
        reads="`configure_optimizers`",
        decide=decisions.cpu_optimizer,
        default=of_deepspeed(True, "it concerns optimizer offload"),
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
