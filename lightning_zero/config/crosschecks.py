"""Checks that take several keys or several facts together; each names the keys it has spoken for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from lightning_zero.config.decisions import Run
from lightning_zero.config.dotted import MISSING, get
from lightning_zero.config.facts import Fact, RunFacts
from lightning_zero.config.values import show

__all__ = ["check_launch", "check_run"]

_LAUNCH: Final = {"num_processes": "world_size", "num_machines": "num_nodes", "machine_rank": "node_rank"}
"""Accelerate's name, and the fact that it is compared with."""


def check_run(run: Run) -> dict[str, str]:
    """A line for each contradiction, by the keys (separated by spaces) that it speaks for."""
    lines = {**_both_precisions(run), **_parallel_sizes(run)}
    if run.facts.purpose == "fit":
        lines |= {**_loop_accumulates(run), **_clipping_by_value(run), **_two_places(run), **_without_type(run)}
    return lines


def check_launch(launch: Mapping[str, Fact[int]], facts: RunFacts) -> list[str]:
    """A line for each number in an Accelerate YAML that differs from the run's."""
    lines = []
    for name, said in launch.items():
        known: Fact[int] | None = getattr(facts, _LAUNCH[name])
        if known is not None and known.value != said.value:
            lines.append(
                f"{name}: {said.origin} says {said.value}, {known.origin} says {known.value}. "
                "Give the Trainer the same number, or take it out of the file."
            )
    return lines


def _both_precisions(run: Run) -> dict[str, str]:
    if not (run.literal("fp16.enabled") is True and run.literal("bf16.enabled") is True):
        return {}
    one, other = (run.origins.get(key, "config") for key in ("fp16.enabled", "bf16.enabled"))
    places = one if one == other else f"{one} and {other}"
    return {
        "fp16.enabled bf16.enabled": f"fp16.enabled and bf16.enabled: {places} says true for both. "
        'Write "auto" in both, and pass the precision to the Trainer.'
    }


def _parallel_sizes(run: Run) -> dict[str, str]:
    """Tensor and sequence parallelism together have to divide the processes."""
    world = run.facts.world_size
    sizes = {key: run.literal(key) for key in ("tensor_parallel.autotp_size", "sequence_parallel_size")}
    used = {key: size for key, size in sizes.items() if isinstance(size, int) and size > 1}
    if world is None or world.value % math.prod(used.values()) == 0:
        return {}
    said = " and ".join(f"{key} says {size}" for key, size in used.items())
    return {
        " ".join(used): f"{said} in {run.origins.get(next(iter(used)), 'config')}, which does not divide the "
        f"{world.value} processes of {world.origin}. Change one of them."
    }


def _loop_accumulates(run: Run) -> dict[str, str]:
    key = "gradient_accumulation_steps"
    steps = run.literal(key)
    if not run.facts.loop_accumulates or steps in (None, 1):
        return {}
    return {
        key: f"{key}: {run.origins.get(key, 'config')} says {steps}, and under Fabric the training loop decides. "
        'Write "auto" or 1 there, and accumulate with fabric.no_backward_sync.'
    }


def _clipping_by_value(run: Run) -> dict[str, str]:
    clip = run.facts.gradient_clip_val
    if run.facts.gradient_clip_algorithm != "value" or clip is None or not clip.value:
        return {}
    return {
        "gradient_clipping": 'gradient_clipping: Trainer(gradient_clip_algorithm="value") asks for clipping by value, '
        'and DeepSpeed clips by norm. Pass gradient_clip_algorithm="norm", or leave gradient_clip_val out.'
    }


def _two_places(run: Run) -> dict[str, str]:
    lines = {}
    for section, from_code, what in (
        ("optimizer", run.facts.optimizer_from_code, "an optimizer"),
        ("scheduler", run.facts.scheduler_from_code, "a scheduler"),
    ):
        if from_code and get(run.values, section) is not MISSING:
            kind: Any = run.literal(f"{section}.type")
            place = run.origins.get(f"{section}.type", "config")
            lines[section] = (
                f"{section}: {place} has a section for {show(kind)}, and the code gives {what} too. "
                "Remove the section, or return nothing from the code."
            )
    return lines


def _without_type(run: Run) -> dict[str, str]:
    """DeepSpeed ignores such a section without a word, and trains at a constant learning rate."""
    lines = {}
    for section, example in (("optimizer", "AdamW"), ("scheduler", "WarmupLR")):
        if get(run.values, section) is not MISSING and get(run.values, f"{section}.type") is MISSING:
            inside = [run.origins[path] for path in run.origins if path.partition(".")[0] == section]
            lines[section] = (
                f"{section}: {inside[0] if inside else 'config'} has a section without a type. "
                f'Write "type": "{example}" in it, or remove the section.'
            )
    return lines
