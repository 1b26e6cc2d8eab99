"""The config of a run that has not started: what is known already, and what only the start will tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from lightning_zero.config.decisions import CPU_OPTIMIZER, MICRO, TOTAL, TOTAL_STEPS, WARMUP_LR, WARMUP_STEPS, Run
from lightning_zero.config.dotted import MISSING, drop, get, is_auto, plain
from lightning_zero.config.facts import RunFacts
from lightning_zero.config.resolve import ResolvedConfig, resolve_config
from lightning_zero.config.rules import RULES
from lightning_zero.config.sources import SourcedConfig

__all__ = ["Foreseen", "foresee"]


@dataclass(frozen=True)
class Foreseen:
    """A config before its run.

    Args:
        resolved: What is known.
        later: The keys that the start of training decides or compares, each with what will decide it.
    """

    resolved: ResolvedConfig
    later: dict[str, str]


def foresee(sourced: SourcedConfig, facts: RunFacts) -> Foreseen:
    """Resolve as far as the facts of a run that has not started go.

    Args:
        sourced: The user's words, composed.
        facts: What is known without model, loaders and optimizer.

    Returns:
        The config, and what is left to the start of training.

    Raises:
        ConfigError: A line for every contradiction that can be seen now.
    """
    resolve_config(sourced, facts, final=False)
    facts = replace(facts, optimizer_from_code="optimizer" not in sourced.values)
    run = Run(facts, sourced.values, sourced.origins)
    later = {key: decided_by for key, (decided_by, is_later) in _LATER.items() if is_later(run, key)}
    values, origins = plain(sourced.values), dict(sourced.origins)
    for key in later:
        drop(values, key)
        origins.pop(key, None)
    resolved = resolve_config(replace(sourced, values=values, origins=origins), facts)
    for key in later:  # absent keys that the final pass would give a default
        drop(resolved.config, key)
        resolved.origins.pop(key, None)
    notes = tuple(note for note in resolved.notes if not note.startswith(tuple(f"{key}:" for key in later)))
    return Foreseen(replace(resolved, notes=notes), later)


def _is_open(run: Run, key: str) -> bool:
    literal = get(run.values, key)
    return (literal is MISSING or is_auto(literal)) and run.supplied(key) is None


def _asks(run: Run, key: str) -> bool:
    return is_auto(get(run.values, key)) and run.supplied(key) is None


def _no_batch_size(run: Run, key: str) -> bool:
    return run.facts.micro_batch_size is None and _is_open(run, MICRO)


def _no_hidden_size(run: Run, key: str) -> bool:
    above = run.stage >= next(rule.from_stage for rule in RULES if rule.key == key)
    return above and _asks(run, key) and run.facts.hidden_size is None and run.supplied("hidden_size") is None


def _share_of_updates(run: Run, key: str) -> bool:
    steps = run.supplied(WARMUP_STEPS) or run.facts.warmup_steps
    return is_auto(get(run.values, key)) and steps is not None and 0 < float(steps.value) < 1


def _swaps_optimizer(run: Run, key: str) -> bool:
    return _is_open(run, key) and run.offloads_optimizer and bool(run.facts.optimizer_from_code)


_Test = Callable[[Run, str], bool]
_HIDDEN: Final = ("the hidden size of the model", _no_hidden_size)
_LATER: Final[dict[str, tuple[str, _Test]]] = {
    MICRO: ("the batch size of the training loader", _no_batch_size),
    TOTAL: (
        "micro-batch x accumulation x processes",
        lambda run, key: _no_batch_size(run, key) and get(run.values, key) is not MISSING,
    ),
    WARMUP_LR: (
        "the optimizer of configure_optimizers",
        lambda run, key: _asks(run, key) and bool(run.facts.optimizer_from_code),
    ),
    TOTAL_STEPS: ("the number of updates in the run", _asks),
    WARMUP_STEPS: ("a share of the updates in the run", _share_of_updates),
    "zero_optimization.reduce_bucket_size": _HIDDEN,
    "zero_optimization.stage3_prefetch_bucket_size": _HIDDEN,
    "zero_optimization.stage3_param_persistence_threshold": _HIDDEN,
    CPU_OPTIMIZER: ("whether DeepSpeed has a CPU version of the optimizer from code", _swaps_optimizer),
}
"""By key: what decides it, and whether a run leaves it to its start."""
