"""What docs/migrating.md promises to those who come from elsewhere."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry

from lightning_zero import resolve_config
from lightning_zero.config.dotted import find_auto
from lightning_zero.config.facts import Fact
from tests.config.runs import facts

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
FROM_LIGHTNING = TEXT.partition("## From Lightning's DeepSpeedStrategy")[2]


def left_column(text: str) -> set[str]:
    """The words in backticks, without values, in the first column of the tables."""
    cells = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    return {word for cell in cells for word in re.findall(r"`(\w+)", cell)}


@pytest.mark.parametrize(
    "words",
    [
        [name for name in inspect.signature(DeepSpeedStrategy.__init__).parameters if name != "self"],
        [name for name in StrategyRegistry.available_strategies() if name.startswith("deepspeed")],
    ],
    ids=["arguments", "names"],
)
def test_everything_of_lightnings_strategy_is_told(words: list[str]) -> None:
    """Each argument and each registered name of Lightning's own strategy has a line in the tables."""
    assert len(words) > 5
    assert set(words) <= left_column(FROM_LIGHTNING)


def test_the_json_that_both_scripts_share() -> None:
    """The JSON of the two scripts resolves under the new one's flags to what the old one's arguments say."""
    [text] = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    run: dict[str, Any] = {
        "micro_batch_size": Fact(4, "DataLoader.batch_size"),
        "accumulate_grad_batches": Fact(2, "Trainer(accumulate_grad_batches=2)"),
        "gradient_clip_val": Fact(1.0, "Trainer(gradient_clip_val=1.0)"),
        "weight_decay": Fact(0.1, "module.hparams.weight_decay"),
        "warmup_steps": Fact(10, "module.hparams.warmup_steps"),
    }
    config = resolve_config(json.loads(text), facts(**run)).config
    assert not list(find_auto(config))
    assert (config["train_batch_size"], config["gradient_clipping"], config["bf16"]) == (16, 1.0, {"enabled": True})
    assert config["optimizer"]["params"] == {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
    assert config["scheduler"]["params"]["warmup_num_steps"] == 10
