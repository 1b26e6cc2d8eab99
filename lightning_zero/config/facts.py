"""What a run knows about itself, before DeepSpeed is asked: the input of the resolver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

__all__ = ["Fact", "RunFacts"]

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Fact(Generic[T_co]):
    """A value and the place it was read from.

    Args:
        value: The value.
        origin: The place in the user's words, for messages and tables: ``Trainer(accumulate_grad_batches=4)``.
    """

    value: T_co
    origin: str


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a run knows. Every field may be left out: ``None`` is "not known", in the early pass "not known yet"."""

    purpose: Literal["fit", "evaluate"] = "fit"
    """``evaluate`` (validate, test, predict) drops optimizer and scheduler and compares no training-only key."""

    world_size: Fact[int] | None = None
    """Processes in the whole run, ``num_nodes * num_devices``."""

    num_nodes: Fact[int] | None = None
    """Machines in the run; compared with an Accelerate YAML's ``num_machines``."""

    node_rank: Fact[int] | None = None
    """This machine's place among them; compared with an Accelerate YAML's ``machine_rank``."""

    accelerator: Literal["cpu", "cuda"] | None = None
    """The kind of device; on ``cpu`` pinned memory is turned off."""

    precision: Fact[str] | None = None
    """Lightning's name: ``32-true``, ``16-mixed``, ``16-true``, ``bf16-mixed``, ``bf16-true``."""

    micro_batch_size: Fact[int] | None = None
    """Samples in one process's micro-batch: the strategy's argument, else the loader's batch size."""

    accumulate_grad_batches: Fact[int] | None = None
    """Micro-batches in one update."""

    loop_accumulates: bool = False
    """True under Fabric, where the user's loop decides how many micro-batches make an update."""

    gradient_clip_val: Fact[float] | None = None
    """Largest gradient norm; ``None`` when the flag is not set."""

    gradient_clip_algorithm: str | None = None
    """``norm`` or ``value``; ``None`` is ``norm``."""

    optimizer_from_code: bool | None = None
    """Whether the module's own code (``configure_optimizers``, ``fabric.setup``) gives the optimizer."""

    scheduler_from_code: bool | None = None
    """Whether the module's own code gives the learning-rate scheduler."""

    optimizer_lrs: Fact[Sequence[float]] | None = None
    """Learning rate of each parameter group of an optimizer from code."""

    optimizer_has_cpu_version: Fact[bool] | None = None
    """Whether DeepSpeed has, and can build here, a CPU version of the optimizer from code."""

    learning_rate: Fact[float] | None = None
    """``lr`` or ``learning_rate`` of the module or its hyper-parameters."""

    betas: Fact[Sequence[float]] | None = None
    """``[beta1, beta2]`` from the hyper-parameters."""

    eps: Fact[float] | None = None
    """``eps`` or ``adam_epsilon`` from the hyper-parameters."""

    weight_decay: Fact[float] | None = None
    """``weight_decay`` from the hyper-parameters."""

    warmup_steps: Fact[float] | None = None
    """``warmup_steps`` or ``warmup_ratio`` from the hyper-parameters, in updates; below 1 a share of all updates."""

    total_steps: Fact[float] | None = None
    """Updates in the whole run, ``trainer.estimated_stepping_batches``; infinite when the length is unknown."""

    hidden_size: Fact[int] | None = None
    """The largest hidden size of any transformers model in the module."""

    gathers_weights: Fact[bool] | None = None
    """Whether a callback writes whole 16-bit weights, which it gathers from the shards."""

    auto: Mapping[str, Any] = field(default_factory=dict)
    """The strategy's ``auto={...}``: values for ``"auto"`` keys by dotted key, and ``hidden_size``."""
