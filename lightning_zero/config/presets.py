"""The shipped starting points, one DeepSpeed JSON file each under ``presets/``; their names are the strategy names."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, Final

from lightning_zero.config.keys import nearest
from lightning_zero.errors import ConfigError

__all__ = ["PRESETS", "preset_text", "preset_values"]

PRESETS: Final = (
    "zero1",
    "zero1_offload",
    "zero2",
    "zero2_offload",
    "zero3",
    "zero3_offload",
    "zero3_nvme",
)
"""Every preset, from the one that saves least memory to the one that saves most."""


def preset_text(name: str) -> str:
    """The shipped JSON of a preset, as it stands in the file.

    Raises:
        ConfigError: When there is no preset of that name.
    """
    if name not in PRESETS:
        near = nearest(name, PRESETS, cutoff=0.6)
        hint = f'write "{near}"' if near else f"write one of {', '.join(PRESETS)}"
        raise ConfigError(f'preset: there is none named "{name}"; {hint}.')
    return resources.files(__package__).joinpath("presets", f"{name}.json").read_text(encoding="utf-8")


def preset_values(name: str) -> dict[str, Any]:
    """The values of a preset, a fresh copy.

    Raises:
        ConfigError: When there is no preset of that name.
    """
    values: dict[str, Any] = json.loads(preset_text(name))
    return values
