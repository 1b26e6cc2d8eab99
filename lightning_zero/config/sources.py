"""Everything the user says about the config, in all its places, composed into one tree with the origin of every value.

``overrides`` win over arguments and strategy name, these over ``config``, that over a preset's other values. Arguments
and strategy name say one thing, stage and offload; what disagrees with them on it is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lightning_zero.config.accelerate import is_accelerate, read_accelerate, read_environment
from lightning_zero.config.checks import (
    OFFLOADS,
    canonicalise,
    check_names,
    check_optimizer_params,
    check_shape,
    check_zero,
)
from lightning_zero.config.dotted import MISSING, drop, get, is_auto, leaves, merge, plain, put
from lightning_zero.config.facts import Fact
from lightning_zero.config.keys import KINDS
from lightning_zero.config.presets import preset_values
from lightning_zero.config.readers import read_file, read_mapping
from lightning_zero.config.values import read, same, show
from lightning_zero.errors import ConfigError

__all__ = ["SourcedConfig", "compose"]

_STAGE: Final = "zero_optimization.stage"
_CONFIG_VARIABLE: Final = "PL_DEEPSPEED_CONFIG_PATH"
_NVME_VARIABLE: Final = "LIGHTNING_ZERO_NVME_PATH"


@dataclass(frozen=True)
class SourcedConfig:
    """The user's words, composed: stage and offload decided, other ``"auto"`` values still open.

    Args:
        values: DeepSpeed's keys, nested.
        origins: Where each value was read, by dotted key.
        launch: ``num_processes``, ``num_machines``, ``machine_rank`` of an Accelerate YAML.
        asked: What ``accelerate launch`` asks for in its variables, by dotted key.
        notes: Remarks for the user, a sentence or two each.
    """

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    launch: Mapping[str, Fact[int]] = field(default_factory=dict)
    asked: Mapping[str, Fact[Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass
class _Source:
    values: dict[str, Any]
    label: str
    launch: dict[str, Fact[int]] = field(default_factory=dict)


def compose(
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    preset: str | None = None,
    stage: int | None = None,
    offload_optimizer: str | None = None,
    offload_param: str | None = None,
    nvme_path: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> SourcedConfig:
    """Compose preset, config, arguments and overrides.

    Args:
        config: DeepSpeed's keys, the path of a DeepSpeed JSON or YAML, or of an Accelerate YAML. ``None``: the file
            that ``PL_DEEPSPEED_CONFIG_PATH`` names, if any.
        preset: A registered strategy name.
        stage: ZeRO stage, 0 to 3.
        offload_optimizer: ``cpu`` or ``nvme``.
        offload_param: ``cpu`` or ``nvme``, stage 3 only.
        nvme_path: A folder on the NVMe drive. ``None``: ``LIGHTNING_ZERO_NVME_PATH``.
        overrides: Values by dotted key, applied last.
        environ: The environment variables.

    Returns:
        A fresh tree; no argument is edited or shared with it.

    Raises:
        ConfigError: A line for everything in the user's words that is wrong or disagrees.
    """
    sources = [
        _Source(preset_values(preset), f"preset {preset}") if preset is not None else None,
        _read_config(config, environ),
        _read_overrides(overrides) if overrides else None,
    ]
    base, said, last = sources
    lines, notes = _check_sources([source for source in sources if source is not None])
    _raise_all(lines)

    arguments = {
        _STAGE: _argument("stage", stage),
        f"{OFFLOADS[0]}.device": _argument("offload_optimizer", offload_optimizer),
        f"{OFFLOADS[1]}.device": _argument("offload_param", offload_param),
    }
    named = _agree_on_zero(arguments, base, said, last, lines)
    values, origins = _merge_all([source for source in (base, said, last) if source is not None])
    for key, fact in named.items():
        literal = get(values, key)
        if literal is MISSING or is_auto(literal):
            put(values, key, fact.value)
            origins[key] = fact.origin
    _settle_zero(values, origins)
    _settle_nvme(values, origins, nvme_path, environ, lines)
    _raise_all(lines + check_zero(values, origins))
    launch = said.launch if said is not None else {}
    return SourcedConfig(values, origins, launch, read_environment(environ), tuple(notes))


def _read_config(
    config: Mapping[str, Any] | str | os.PathLike[str] | None, environ: Mapping[str, str]
) -> _Source | None:
    suffix, folder = "", None
    if config is None:
        config, suffix = environ.get(_CONFIG_VARIABLE), f" ({_CONFIG_VARIABLE})"
        if not config:
            return None
    if isinstance(config, Mapping):
        source = _Source(read_mapping(config, "config"), "config")
    elif isinstance(config, str) and config.lstrip().startswith(("{", "[")):
        raise ConfigError(
            f"config: is the text {show(config)}. Pass a mapping of DeepSpeed's keys, or the path of a file."
        )
    elif isinstance(config, (str, os.PathLike)):
        path = Path(config).expanduser()
        folder = path.parent
        source = _Source(read_file(path, said_by=suffix), f"config file {path.name}{suffix}")
    else:
        raise ConfigError(
            f"config: is a {type(config).__name__}. "
            "Pass a mapping of DeepSpeed's keys, or the path of a JSON or YAML file."
        )
    if is_accelerate(source.values):
        accelerate = read_accelerate(source.values, source.label, folder)
        return _Source(accelerate.values, accelerate.label, accelerate.launch)
    return source


def _read_overrides(overrides: Mapping[str, Any]) -> _Source:
    values: dict[str, Any] = {}
    for key, value in read_mapping(overrides, "overrides").items():
        present = get(values, key)
        both = isinstance(present, Mapping) and isinstance(value, Mapping)
        put(values, key, merge(present, value) if both else value)
    return _Source(values, "overrides")


def _check_sources(sources: list[_Source]) -> tuple[list[str], list[str]]:
    """Check and canonicalise every source by itself; lines for errors, notes for remarks."""
    lines: list[str] = []
    notes: list[str] = []
    for source in sources:
        shape = check_shape(source.values, source.label)
        names, unknown = check_names(source.values, source.label)
        lines += shape + names + check_optimizer_params(source.values, source.label)
        notes += unknown
        if not shape:
            lines += canonicalise(source.values, source.label)
    return lines, notes


def _argument(name: str, value: Any) -> Fact[Any] | None:
    if value is None:
        return None
    if name == "stage":
        try:
            value = read("integer", value)
        except ValueError:
            raise ConfigError(f"stage: the argument says {show(value)}. Pass 0, 1, 2 or 3.") from None
    return Fact(value, f"argument {name}={show(value)}")


def _agree_on_zero(
    arguments: Mapping[str, Fact[Any] | None],
    base: _Source | None,
    said: _Source | None,
    last: _Source | None,
    lines: list[str],
) -> dict[str, Fact[Any]]:
    """What arguments and strategy name say on stage and offload; a line for every place that says something else."""
    named: dict[str, Fact[Any]] = {}
    for key, argument in arguments.items():
        places = [argument, *(_literal(source, key) for source in (base, said, last))]
        first = places[0] or places[1]
        if first is None:
            continue
        named[key] = first
        lines += [
            f"{key}: {other.origin} says {show(other.value)}, {first.origin} says {show(first.value)}. "
            "Keep one of the two."
            for other in places[1:]
            if other is not None and not same(other.value, first.value)
        ]
    return named


def _literal(source: _Source | None, key: str) -> Fact[Any] | None:
    value = get(source.values, key) if source is not None else MISSING
    if source is None or value is MISSING or value is None or is_auto(value):
        return None
    return Fact(value, source.label)


def _merge_all(sources: list[_Source]) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source in sources:
        values = merge(values, source.values)
        origins.update({path: source.label for path, _ in leaves(source.values)})
    for path in KINDS:
        if get(values, path) is None:  # null: as if the key were not there, whatever an earlier place says
            drop(values, path)
    return values, {path: origins[path] for path, _ in leaves(values) if path in origins}


def _settle_zero(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Stage 2 and no offload, where nothing says otherwise."""
    stage = get(values, _STAGE)
    if stage is MISSING or is_auto(stage):
        put(values, _STAGE, 2)
        origins[_STAGE] = "default"
    for section in OFFLOADS:
        key = f"{section}.device"
        if is_auto(get(values, key)):
            put(values, key, "none")
            origins[key] = "default: no offload is asked for"


def _settle_nvme(
    values: dict[str, Any],
    origins: dict[str, str],
    nvme_path: str | os.PathLike[str] | None,
    environ: Mapping[str, str],
    lines: list[str],
) -> None:
    """Put the NVMe folder where it is needed; a line where there is none, or two different ones."""
    argument = Fact(os.fspath(nvme_path), "nvme_path") if nvme_path is not None else None
    variable = Fact(environ[_NVME_VARIABLE], _NVME_VARIABLE) if environ.get(_NVME_VARIABLE) else None
    for section in OFFLOADS:
        key = f"{section}.nvme_path"
        literal = get(values, key)
        is_open = literal is MISSING or is_auto(literal) or not str(literal)
        if get(values, f"{section}.device") != "nvme":
            if is_open:
                drop(values, key)
                origins.pop(key, None)
            continue
        known = argument or (variable if is_open else None)
        if is_open and known is None:
            lines.append(f"{key}: nothing says where the NVMe drive is. Pass nvme_path=... or set {_NVME_VARIABLE}.")
        elif is_open and known is not None:
            put(values, key, known.value)
            origins[key] = known.origin
        elif known is not None and Path(str(literal)) != Path(known.value):
            lines.append(
                f"{key}: {origins[key]} says {show(str(literal))}, nvme_path says {show(known.value)}. "
                "Keep one of the two."
            )
        if not is_open:
            put(values, key, str(plain(literal)))


def _raise_all(lines: list[str]) -> None:
    if lines:
        raise ConfigError("\n".join(lines))
