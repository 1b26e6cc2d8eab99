"""The table of a resolved config, and the page that is made from the rules."""

from __future__ import annotations

from pathlib import Path

from lightning_zero.config.explain import explain
from lightning_zero.config.keys import ALIASES
from lightning_zero.config.reference import render_reference
from lightning_zero.config.rules import RULES
from lightning_zero.config.sources import compose
from tests.config.runs import resolved

DOCS = Path(__file__).parents[2] / "docs"


def test_every_key_with_value_and_origin() -> None:
    """Proves that a row of the table holds the dotted key, the value as JSON, and the place."""
    lines = explain(resolved(compose(preset="zero3_offload", environ={})), width=200).splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert ["zero_optimization.offload_param.device", '"cpu"', "preset zero3_offload"] in rows
    assert ["bf16.enabled", "true", "Trainer(precision='bf16-mixed')"] in rows
    assert ["steps_per_print", "null", "default: quiet"] in rows
    assert all(len(row) == 3 and row[2] for row in rows)


def test_brackets_are_text() -> None:
    """Proves that a value in brackets is printed and not taken for a style."""
    config = {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}, "wandb": {"team": "[bold]x"}}
    table = explain(resolved(config), width=200)
    assert "[0.9, 0.95]" in table
    assert "[bold]x" in table


def test_a_narrow_table_loses_nothing() -> None:
    """Proves that a long origin is folded and not cut."""
    assert "…" not in explain(resolved({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}), width=50)


def test_the_page_is_up_to_date() -> None:
    """Proves that docs/auto.md is what the rules say; `lightning_zero.config.reference` writes it."""
    assert (DOCS / "auto.md").read_text(encoding="utf-8") == render_reference()


def test_the_page_names_every_key() -> None:
    """Proves that no rule and no other spelling is missing from the page."""
    page = render_reference()
    assert [rule.key for rule in RULES if f"| `{rule.key}` |" not in page] == []
    assert [alias for alias in ALIASES if f"| `{alias}` |" not in page] == []
