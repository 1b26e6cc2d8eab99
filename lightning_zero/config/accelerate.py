"""What an Accelerate YAML, or the variables that ``accelerate launch`` sets, say about DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lightning_zero.config.dotted import MISSING, get, is_auto, leaves, put
from lightning_zero.config.facts import Fact
from lightning_zero.config.keys import KINDS
from lightning_zero.config.readers import read_file
from lightning_zero.config.values import read, same, show
from lightning_zero.errors import ConfigError

__all__ = ["AccelerateConfig", "is_accelerate", "read_accelerate", "read_environment"]

_FIELDS: Final = {
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
}
"""Accelerate's inline field, and DeepSpeed's key for it."""

_VARIABLES: Final = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "zero3_save_16bit_model",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
}

_MIXED_PRECISION: Final = {"bf16": "bf16.enabled", "fp16": "fp16.enabled"}

_LAUNCH: Final = ("num_processes", "num_machines", "machine_rank")


@dataclass(frozen=True)
class AccelerateConfig:
    """What an Accelerate YAML says.

    Args:
        values: DeepSpeed's keys, those of the file it points to included.
        label: The place, for messages.
        launch: ``num_processes``, ``num_machines``, ``machine_rank`` where given.
    """

    values: dict[str, Any]
    label: str
    launch: dict[str, Fact[int]] = field(default_factory=dict)


def is_accelerate(values: Mapping[str, Any]) -> bool:
    """Whether a mapping is an Accelerate config and not a DeepSpeed one."""
    return "distributed_type" in values or "deepspeed_config" in values


def read_accelerate(values: Mapping[str, Any], label: str, folder: Path | None) -> AccelerateConfig:
    """The DeepSpeed part of an Accelerate config.

    Args:
        values: The Accelerate config.
        label: Where it was read, for messages.
        folder: The folder it lies in. A relative ``deepspeed_config_file`` is looked for in the working folder, then
            here.

    Raises:
        ConfigError: When it is for something else than DeepSpeed, or says two things about one setting.
    """
    kind = values.get("distributed_type", "DEEPSPEED")
    if str(kind).upper() != "DEEPSPEED":
        raise ConfigError(
            f"distributed_type: {label} says {show(kind)}, which sets up no DeepSpeed. "
            "Write DEEPSPEED there, or pass a DeepSpeed JSON."
        )
    section = values.get("deepspeed_config") or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"deepspeed_config: {label} holds a {type(section).__name__}. Write a mapping of its fields.")
    launch = {name: Fact(_whole(name, values[name], label), label) for name in _LAUNCH if values.get(name) is not None}
    return AccelerateConfig(_with_inline(section, values.get("mixed_precision"), label, folder), label, launch)


def read_environment(environ: Mapping[str, str]) -> dict[str, Fact[Any]]:
    """What ``accelerate launch`` asks for in its ``ACCELERATE_*`` variables, by DeepSpeed's dotted key."""
    if environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return {}
    asked: dict[str, Fact[Any]] = {}
    file = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if _is_said(file) and Path(file).is_file():
        asked.update({key: Fact(value, "ACCELERATE_DEEPSPEED_CONFIG_FILE") for key, value in leaves(read_file(file))})
    for variable, name in _VARIABLES.items():
        if variable in environ and not is_auto(environ[variable]):
            asked[_FIELDS[name]] = Fact(environ[variable], variable)
    mixed = _MIXED_PRECISION.get(environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    if mixed:
        asked[mixed] = Fact(True, "ACCELERATE_MIXED_PRECISION")
    return {key: fact for key, fact in asked.items() if not is_auto(fact.value)}


def _with_inline(section: Mapping[str, Any], mixed_precision: Any, label: str, folder: Path | None) -> dict[str, Any]:
    """The file's values, with the inline fields where the file says ``"auto"`` or nothing."""
    file = section.get("deepspeed_config_file")
    values = read_file(_find(str(file), folder)) if _is_said(file) else {}
    inline = {key: section[name] for name, key in _FIELDS.items() if _has(section, name)}
    if mixed_precision in _MIXED_PRECISION:
        inline[_MIXED_PRECISION[mixed_precision]] = True
    lines = []
    for key, value in inline.items():
        literal = get(values, key)
        if literal is MISSING or is_auto(literal):
            put(values, key, value)
        elif not _agree(key, literal, value):
            lines.append(f"{key}: {file} says {show(literal)}, {label} says {show(value)}. Write it in one of the two.")
    if lines:
        raise ConfigError("\n".join(lines))
    return values


def _has(section: Mapping[str, Any], name: str) -> bool:
    """Whether a field says something: Accelerate writes ``none`` for a path that there is not."""
    value = section.get(name)
    return value is not None and not (name.endswith("_path") and not _is_said(value))


def _is_said(value: Any) -> bool:
    return value is not None and str(value).lower() not in ("", "none")


def _agree(key: str, one: Any, other: Any) -> bool:
    kind = KINDS.get(key, "any")
    try:
        return same(read(kind, one), read(kind, other))
    except ValueError:
        return False


def _find(file: str, folder: Path | None) -> Path:
    path = Path(file).expanduser()
    if folder is not None and not path.is_absolute() and not path.exists() and (folder / path).exists():
        return folder / path
    return path


def _whole(name: str, value: Any, label: str) -> int:
    try:
        number: int = read("integer", value)
    except ValueError as error:
        raise ConfigError(f"{name}: {label} says {show(value)}. Write {error} there.") from None
    return number
