"""The shipped starting points."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_zero.config.presets import PRESETS, preset_text, preset_values
from lightning_zero.config.sources import compose

SHIPPED = Path(__file__).parents[2] / "configs" / "deepspeed"


def test_every_preset_is_shipped() -> None:
    """Proves that the folder holds one file for each name, and no other."""
    assert sorted(file.stem for file in SHIPPED.iterdir()) == sorted(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_the_shipped_file_is_the_preset(name: str) -> None:
    """Proves that the file that a user copies from is the one that the strategy's name stands for."""
    file = SHIPPED / f"{name}.json"
    assert json.loads(file.read_text(encoding="utf-8")) == preset_values(name) == json.loads(preset_text(name))
    by_name = compose(preset=name, nvme_path="/fast", environ={}).values
    by_file = compose(file, nvme_path="/fast", environ={}).values
    assert by_name == by_file


@pytest.mark.parametrize("name", PRESETS)
def test_what_the_name_says(name: str) -> None:
    """Proves that stage and offload in the name are those in the file, and that the run's own numbers are "auto"."""
    values = preset_values(name)
    zero = values.pop("zero_optimization")
    assert zero["stage"] == int(name[4])
    offloads = {"": [], "offload": ["optimizer"], "nvme": ["optimizer"]}[name[6:]]
    if name[6:] and zero["stage"] == 3:
        offloads = ["optimizer", "param"]
    device = "nvme" if name.endswith("nvme") else "cpu"
    assert {key: zero[key]["device"] for key in zero if key.startswith("offload")} == {
        f"offload_{what}": device for what in offloads
    }
    assert values == {
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }


def test_a_preset_is_a_fresh_copy() -> None:
    """Proves that editing one copy does not change the next."""
    preset_values("zero3")["zero_optimization"]["stage"] = 0
    assert preset_values("zero3")["zero_optimization"]["stage"] == 3
