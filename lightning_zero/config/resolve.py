"""The resolver: the user's words and the run's facts in, a whole DeepSpeed config and the origin of every value out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from lightning_zero.config.checks import OFFLOADS
from lightning_zero.config.crosschecks import check_launch, check_run
from lightning_zero.config.decisions import MICRO, WARMUP_STEPS, Run
from lightning_zero.config.dotted import MISSING, drop, find_auto, get, is_auto, leaves, plain, put
from lightning_zero.config.facts import Fact, RunFacts
from lightning_zero.config.keys import KINDS, left_to_deepspeed, nearest
from lightning_zero.config.rules import RULES, Absent, Rule
from lightning_zero.config.sources import SourcedConfig, compose
from lightning_zero.config.values import Kind, read, same, show
from lightning_zero.errors import ConfigError

__all__ = ["ResolvedConfig", "resolve_config"]

_FACT_KINDS: Final[Mapping[str, Kind]] = {
    "world_size": "count",
    "num_nodes": "count",
    "node_rank": "integer",
    "micro_batch_size": "count",
    "accumulate_grad_batches": "count",
    "gradient_clip_val": "number",
    "learning_rate": "number",
    "betas": "numbers",
    "eps": "number",
    "weight_decay": "number",
    "warmup_steps": "number",
    "total_steps": "number",
    "hidden_size": "count",
}


@dataclass(frozen=True)
class ResolvedConfig:
    """A DeepSpeed config in which nothing is left to guess.

    Args:
        config: DeepSpeed's keys, a fresh dict.
        origins: Where each value was read, by dotted key.
        notes: Remarks for the user, a sentence or two each.
    """

    config: dict[str, Any]
    origins: dict[str, str]
    notes: tuple[str, ...] = ()

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return int(get(self.config, "zero_optimization.stage"))

    @property
    def offload_optimizer(self) -> str:
        """Where optimizer states are offloaded to: ``none``, ``cpu`` or ``nvme``."""
        return self._device(OFFLOADS[0])

    @property
    def offload_param(self) -> str:
        """Where parameters are offloaded to: ``none``, ``cpu`` or ``nvme``."""
        return self._device(OFFLOADS[1])

    def _device(self, section: str) -> str:
        device = get(self.config, f"{section}.device")
        return "none" if device is MISSING else str(device)


def resolve_config(
    config: Mapping[str, Any] | str | os.PathLike[str] | SourcedConfig | None,
    facts: RunFacts,
    *,
    final: bool = True,
) -> ResolvedConfig:
    """Fill every ``"auto"`` from the run's facts, and compare every literal with them.

    Args:
        config: DeepSpeed's keys, the path of a file that holds them, or what :func:`compose` made of the user's words.
        facts: What the run knows.
        final: Whether everything is known that will be. The early pass leaves keys that are still open out of the
            result; the final pass leaves nothing open.

    Returns:
        The config, the origin of every value, and remarks.

    Raises:
        ConfigError: A line for every contradiction, with both values, both places and the remedy; and in the final pass
            for every ``"auto"`` that nothing supplies.
    """
    sourced = config if isinstance(config, SourcedConfig) else compose(config)
    lines: list[str] = []
    work = _Resolution(sourced, _read_facts(facts, lines), final)
    if not lines:
        lines = work.run()
    if lines:
        raise ConfigError("\n".join(lines))
    return ResolvedConfig(work.values, work.origins, tuple(dict.fromkeys(work.notes)))


def _read_facts(facts: RunFacts, lines: list[str]) -> RunFacts:
    """The facts with numbers as numbers (hyper-parameters from a YAML may be strings); a line for what is none."""
    changes: dict[str, Any] = {}
    for name, kind in _FACT_KINDS.items():
        fact: Fact[Any] | None = getattr(facts, name)
        if fact is not None:
            changes[name] = replace(fact, value=_read(kind, fact.value, f"{name}: {fact.origin} says", lines))
    auto = {}
    for key, value in facts.auto.items():
        kind = "count" if key == "hidden_size" else KINDS.get(key, "any")
        if key == WARMUP_STEPS:
            kind = "number"  # below 1 it is a share
        auto[key] = _read(kind, value, f'auto["{key}"]: says', lines)
        if key != "hidden_size" and key not in KINDS:
            near = nearest(key, KINDS)
            if near:
                lines.append(f'auto["{key}"]: DeepSpeed has no such key. Write "{near}".')
    return replace(facts, auto=auto, **changes)


def _read(kind: Kind, value: Any, said: str, lines: list[str]) -> Any:
    if value is None:
        return None
    try:
        return read(kind, value)
    except ValueError as error:
        lines.append(f"{said} {show(value)}. Write {error} there.")
        return value


class _Resolution:
    """One pass over one fresh copy of the user's config."""

    def __init__(self, sourced: SourcedConfig, facts: RunFacts, final: bool) -> None:
        self.sourced = sourced
        self.facts = facts
        self.final = final
        self.values: dict[str, Any] = plain(sourced.values)
        self.origins = dict(sourced.origins)
        self.notes = list(sourced.notes)
        self.lines: list[str] = []
        self.view = Run(facts, self.values, self.origins)

    @property
    def evaluates(self) -> bool:
        return self.facts.purpose == "evaluate"

    def run(self) -> list[str]:
        """Resolve, and return a line for everything that is wrong."""
        if self.evaluates:
            for key in ("optimizer", "scheduler", "train_batch_size"):
                self.remove(key)
        else:
            self.lines += check_launch(self.sourced.launch, self.facts)
        reported = check_run(self.view)
        self.lines += reported.values()
        spoken_for = {key for keys in reported for key in keys.split()}
        for rule in RULES:
            self.apply(rule, compare=rule.key not in spoken_for)
        self.pin_memory()
        self.fill_the_rest()
        if self.final:
            self.remark_cpu_optimizer()
            self.remark_accelerate()
            self.remark_unused()
        elif get(self.values, MICRO) is MISSING:
            self.hold_the_place_of_the_batch()
        return self.lines

    def apply(self, rule: Rule, *, compare: bool) -> None:
        """Apply one row: fill what is open, compare what is not."""
        literal = get(self.values, rule.key)
        is_open = literal is MISSING or is_auto(literal)
        is_due = self.view.stage >= rule.from_stage and (self.final or rule.since == "early")
        if not is_due:
            if is_open:
                self.remove(rule.key)
            return
        if literal is MISSING and not self.may_write(rule):
            return
        fact = self.decide(rule)
        if is_open:
            self.fill(rule, fact, absent=literal is MISSING)
        elif rule.match and compare and not (self.evaluates and rule.training):
            self.compare(rule, literal, fact)

    def may_write(self, rule: Rule) -> bool:
        if self.evaluates and rule.training:
            return rule.key == MICRO
        return rule.absent is not Absent.LEAVE

    def decide(self, rule: Rule) -> Fact[Any] | None:
        """What the run, or the strategy's ``auto={...}``, says about a key."""
        supplied = self.view.supplied(rule.key)
        if rule.supplied_first and rule.key != WARMUP_STEPS and supplied is not None:
            return supplied
        return rule.decide(self.view) or supplied

    def fill(self, rule: Rule, fact: Fact[Any] | None, *, absent: bool) -> None:
        """Write what decides an open key, or in the final pass its default, or a line that nothing does."""
        if fact is None and self.final and rule.default and not (absent and rule.absent is Absent.WRITE_KNOWN):
            fact = rule.default(self.view)
            # Fabric never sees the loaders' batch size, and says so only to those who ask for it by "auto".
            silent = self.evaluates or (absent and self.facts.loop_accumulates)
            if fact is not None and rule.default_note and not silent:
                self.notes.append(rule.default_note)
        if fact is None:
            if not absent and self.final and not (self.evaluates and rule.training):
                self.lines.append(
                    f'{rule.key}: {self.origins[rule.key]} says "auto", and nothing supplies it. {rule.missing}'
                )
            self.remove(rule.key)
        elif not (absent and rule.absent is Absent.WRITE_TRUE and not fact.value):
            put(self.values, rule.key, plain(fact.value))
            self.origins[rule.key] = fact.origin

    def compare(self, rule: Rule, literal: Any, fact: Fact[Any] | None) -> None:
        if fact is None:
            if rule.unset:
                self.origins[rule.key] += f" ({rule.unset})"
        elif not same(literal, fact.value):
            self.lines.append(
                f"{rule.key}: {self.origins[rule.key]} says {show(literal)}, {fact.origin} says {show(fact.value)}. "
                f"{rule.remedy}"
            )
            put(self.values, rule.key, plain(fact.value))  # rows below go on with the run's value

    def pin_memory(self) -> None:
        """Turn pinned memory off where there is no accelerator to read it."""
        for section in OFFLOADS:
            key = f"{section}.pin_memory"
            pinned = get(self.values, key)
            if self.facts.accelerator != "cpu" or is_auto(pinned) or pinned is False:
                continue
            if get(self.values, f"{section}.device") in ("cpu", "nvme"):
                put(self.values, key, False)
                self.origins[key] = "off on CPU: pinned memory needs an accelerator"

    def fill_the_rest(self) -> None:
        """Fill what ``auto={...}`` names and no row does; a line for every ``"auto"`` that is left."""
        for path in list(find_auto(self.values)):
            if left_to_deepspeed(path):
                continue
            supplied = self.view.supplied(path)
            if supplied is not None:
                put(self.values, path, plain(supplied.value))
                self.origins[path] = supplied.origin
            else:
                self.lines.append(self.leftover(path))

    def leftover(self, path: str) -> str:
        key, _, in_list = path.partition("[")
        fillable = [rule.key for rule in RULES]
        section, _, name = key.rpartition(".")
        inside = [rule_key for rule_key in fillable if rule_key.rpartition(".")[0] == section]
        near = nearest(name, [rule_key.rpartition(".")[2] for rule_key in inside], cutoff=0.0)
        near_key = f"{section}.{near}" if section and near else near or nearest(key, fillable, cutoff=0.0)
        remedy = "Write a value there" if in_list else f'Write a value there, or pass auto={{"{key}": ...}}'
        return (
            f'{path}: {self.origins.get(key, "config")} says "auto", and nothing supplies it. '
            f'{remedy}; the nearest key that a run fills is "{near_key}".'
        )

    def hold_the_place_of_the_batch(self) -> None:
        """Give ``zero.Init`` a batch size, which DeepSpeed wants in every config, until the loaders are known."""
        self.remove("train_batch_size")
        put(self.values, MICRO, 1)
        self.origins[MICRO] = "placeholder until the loaders are known"

    def remark_cpu_optimizer(self) -> None:
        """Say that an offloaded optimizer stays as it is because DeepSpeed has no CPU version of it."""
        has_version = self.facts.optimizer_has_cpu_version
        if self.view.offloads_optimizer and has_version is not None and not has_version.value and not self.evaluates:
            self.notes.append(
                f"zero_force_ds_cpu_optimizer: {has_version.origin} has no CPU version in DeepSpeed, so it is kept "
                "and steps on the CPU as it is. Adam and AdamW have one."
            )

    def remark_accelerate(self) -> None:
        """Say where ``accelerate launch`` asks for something else."""
        for key, asked in self.sourced.asked.items():
            ours = get(self.values, key)
            wanted = _read(KINDS.get(key, "any"), asked.value, key, [])
            if ours is MISSING and wanted in (False, "none", None):
                continue
            if ours is MISSING or not same(ours, wanted):
                here = "nothing" if ours is MISSING else show(ours)
                self.notes.append(
                    f"{key}: {asked.origin} asks for {show(wanted)}, the config has {here}. The config holds."
                )

    def remark_unused(self) -> None:
        """Say which values of ``auto={...}`` found no key."""
        for key in self.facts.auto:
            if key != "hidden_size" and get(self.sourced.values, key) is MISSING and not self.evaluates:
                self.notes.append(f'auto["{key}"]: is not used, since the config has no such key. Write "auto" there.')

    def remove(self, key: str) -> None:
        """Take a key, and all that is under it, out of the config."""
        section = get(self.values, key)
        inner = [f"{key}.{path}" for path, _ in leaves(section)] if isinstance(section, Mapping) else []
        for path in [key, *inner]:
            self.origins.pop(path, None)
        drop(self.values, key)
