"""Checks that need the config alone, no run: its shape, its spelling, its stage and its offload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lightning_zero.config.dotted import MISSING, drop, get, is_auto, put
from lightning_zero.config.keys import ALIASES, CLOSED_SECTIONS, KINDS, SECTIONS, known_keys, nearest
from lightning_zero.config.values import read, same, show

__all__ = [
    "DEVICES",
    "OFFLOADS",
    "STAGES",
    "canonicalise",
    "check_names",
    "check_optimizer_params",
    "check_shape",
    "check_zero",
]

STAGES: Final = (0, 1, 2, 3)
DEVICES: Final = ("none", "cpu", "nvme")
OFFLOADS: Final = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")

_LEAF_FORMS: Final = {
    "optimizer": '{"type": "AdamW", "params": {"lr": "auto"}}',
    "optimizer.params": '{"lr": "auto"}',
    "scheduler": '{"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}',
    "scheduler.params": '{"total_num_steps": "auto"}',
    "fp16": '{"enabled": "auto"}',
    "bf16": '{"enabled": "auto"}',
    "zero_optimization": '{"stage": "auto"}',
    "zero_optimization.offload_optimizer": '{"device": "auto"}',
    "zero_optimization.offload_param": '{"device": "auto"}',
}

_DEPRECATED_OFFLOADS: Final = {
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param",
}


def check_shape(values: Mapping[str, Any], label: str) -> list[str]:
    """A line for every section that is something else than a mapping."""
    lines = []
    for path in sorted(SECTIONS):
        value = get(values, path)
        if value is MISSING or value is None or isinstance(value, Mapping):
            continue
        form = _LEAF_FORMS.get(path, "{...} with its keys, or leave it out")
        lines.append(f'{path}: {label} says {show(value)} where a mapping belongs. Write "{_last(path)}": {form}.')
    return lines


def canonicalise(values: dict[str, Any], label: str) -> list[str]:
    """Bring one source's values into the one form that the rest reads, in place; a line for what cannot be.

    Other spellings become the one that counts, numbers in strings become numbers, and an offload given as ``null`` says
    ``none``.
    """
    lines = []
    for alias, key in ALIASES.items():
        value = get(values, alias)
        if value is MISSING:
            continue
        drop(values, alias)
        other = get(values, key)
        if other is MISSING:
            put(values, key, value)
        elif not same(other, value):
            lines.append(
                f"{key}: {label} says {show(other)}, and {show(value)} under its other name "
                f'"{_last(alias)}". Remove one of them.'
            )
    for old, section in _DEPRECATED_OFFLOADS.items():
        if get(values, old) is not MISSING:
            asked = get(values, old)
            drop(values, old)
            if asked is True and get(values, section) is MISSING:
                put(values, f"{section}.device", "cpu")
    for section in OFFLOADS:
        if get(values, section) is None:
            put(values, f"{section}.device", "none")
    return lines + _read_values(values, label)


def _read_values(values: dict[str, Any], label: str) -> list[str]:
    lines = []
    for path, kind in KINDS.items():
        value = get(values, path)
        if value is MISSING or value is None or kind in ("section", "any"):
            continue
        if is_auto(value):
            put(values, path, "auto")
        elif isinstance(value, list) and any(is_auto(entry) for entry in value):
            continue  # reported with its place in the list when the run is known
        else:
            try:
                put(values, path, read(kind, value))
            except ValueError as error:
                lines.append(f"{path}: {label} says {show(value)}. Write {error} there.")
    return lines


def check_names(values: Mapping[str, Any], label: str) -> tuple[list[str], list[str]]:
    """A line for every misspelt key, with the nearest known one, and a note for every key that is like none."""
    lines, notes = [], []
    for section in sorted(CLOSED_SECTIONS):
        node = get(values, section) if section else values
        if not isinstance(node, Mapping):
            continue
        known = known_keys(section)
        for key in node:
            if key in known:
                continue
            path = f"{section}.{key}" if section else key
            near = nearest(key, known, cutoff=0.8 if section else 0.85)  # DeepSpeed refuses unknown inner keys
            if near:
                lines.append(f'{path}: DeepSpeed has no such key, and {label} has it. Write "{near}".')
            else:
                notes.append(f"{path}: {label} has it, and DeepSpeed lists no such key. It is passed on unchanged.")
    return lines, notes


# What DeepSpeed's Adam and AdamW take, on the host and on the device, and what other programs call it.
_ADAM_PARAMS: Final = frozenset(
    [
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "bias_correction",
        "amsgrad",
        "adam_w_mode",
        "torch_adam",
        "foreach",
        "fp32_optimizer_states",
        "set_grad_none",
    ]
)
_OTHER_NAMES: Final = {"learning_rate": "lr", "adam_epsilon": "eps", "epsilon": "eps", "decay": "weight_decay"}


def check_optimizer_params(values: Mapping[str, Any], label: str) -> list[str]:
    """A line for every parameter that DeepSpeed's Adam or AdamW would refuse with a bare TypeError."""
    section, params = get(values, "optimizer"), get(values, "optimizer.params")
    if not isinstance(section, Mapping) or not isinstance(params, Mapping):
        return []
    if str(section.get("type")).lower() not in ("adam", "adamw"):
        return []
    lines = []
    for name in params:
        if name not in _ADAM_PARAMS:
            near = _OTHER_NAMES.get(name) or nearest(name, _ADAM_PARAMS, cutoff=0.6)
            remedy = f'Write "{near}"' if near else f"Use {', '.join(sorted(_ADAM_PARAMS))}"
            lines.append(
                f"optimizer.params.{name}: {label} has it, and {section['type']} takes no such value. {remedy}."
            )
    return lines


def check_zero(values: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """A line for a stage or an offload that DeepSpeed does not have, or would ignore."""
    stage = get(values, "zero_optimization.stage")
    if stage not in STAGES:
        return [
            f"zero_optimization.stage: {origins['zero_optimization.stage']} says {show(stage)}. Write 0, 1, 2 or 3."
        ]
    lines = []
    for section, lowest in zip(OFFLOADS, (1, 3), strict=True):
        key = f"{section}.device"
        device = get(values, key)
        if device is MISSING or device == "none":
            continue
        origin = origins.get(key, "config")
        if device not in DEVICES:
            near = nearest(str(device), DEVICES, cutoff=0.5)
            hint = f'"{near}"' if near else '"cpu" or "nvme"'
            lines.append(f"{key}: {origin} says {show(device)}, which is no offload device. Write {hint}.")
        elif stage < lowest:
            lines.append(
                f"{key}: {origin} says {show(device)}, which DeepSpeed ignores at stage {stage}. "
                f"Use stage {lowest}{'' if lowest == 3 else ' or above'}, or leave {_last(section)} out."
            )
    return lines


def _last(path: str) -> str:
    return path.rpartition(".")[2]
