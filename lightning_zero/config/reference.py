"""``docs/auto.md``, made from the rules: ``python -m lightning_zero.config.reference > docs/auto.md``."""

from __future__ import annotations

import sys
from typing import Final

from lightning_zero.config.keys import ALIASES, LEFT_TO_DEEPSPEED
from lightning_zero.config.presets import PRESETS
from lightning_zero.config.rules import RULES, Rule

__all__ = ["render_reference"]

_HEAD: Final = """\
# What fills `"auto"`

This page is made from the rules in `lightning_zero/config/rules.py`. After changing them, run
`python -m lightning_zero.config.reference > docs/auto.md`.

A DeepSpeed config may say `"auto"` wherever the run knows better. Write the batch keys and the precision that way, and
keep each number in one place: the Trainer. A config that says something else than the run is an error that shows both
values and both places; all contradictions stand in one error, before the model is built where the flags alone decide.

"Must match" means that a literal that differs from the run's value is such a contradiction; "fills" means that a
literal always holds. Numbers compare as numbers: `2e8`, `200000000` and `"2e8"` are one value. *Early* keys are decided
before `configure_model`, *final* ones when model, optimizer and the number of updates exist.

| DeepSpeed key | rule | value | where it is read | pass | when the key is absent |
|---|---|---|---|---|---|
"""

_TAIL: Final = """\

`stage3_*` keys that say `"auto"` below stage 3 are left out. What the strategy's `auto={{...}}` says comes before the
hyper-parameters for optimizer and scheduler keys, and fills any other key that says `"auto"` and that nothing else
supplies: `auto={{"optimizer.params.lr": 1e-4, "hidden_size": 768}}`.

## Decided by the strategy's arguments and name

| DeepSpeed key | value |
|---|---|
| `zero_optimization.stage` | `stage=`, else the strategy's name, else the config, else 2 |
| `zero_optimization.offload_optimizer.device` | `offload_optimizer=`, else name, else config; stages 1 to 3 |
| `zero_optimization.offload_param.device` | `offload_param=`, else name, else config; stage 3 only |
| `zero_optimization.offload_*.nvme_path` | `nvme_path=`, else the config, else `LIGHTNING_ZERO_NVME_PATH` |
| `zero_optimization.offload_*.pin_memory` | off on CPU, where there is nothing to pin memory for |

The names are {presets}. Their files lie in `configs/deepspeed/`.

## Left to DeepSpeed

DeepSpeed itself understands `"auto"` at {left}. Anywhere else an `"auto"` that is left over is an error.

## Other spellings

| spelling | counts as |
|---|---|
{aliases}

## Which place wins

`overrides` come before arguments and strategy name, these before `config`, and that before a preset's other values.
Arguments and strategy name say one thing: which stage, and what is offloaded. Any other place that says something else
on that is an error; `overrides` may change what `config` says. `PL_DEEPSPEED_CONFIG_PATH` stands for `config` when none
is given. What `accelerate launch` asks for in its variables is compared with the result and reported; the config holds.

`validate`, `test` and `predict` leave the optimizer and scheduler sections out and compare no training-only key.
"""


def render_reference() -> str:
    """The whole page, as Markdown."""
    return (
        _HEAD
        + "".join(_row(rule) for rule in RULES)
        + _TAIL.format(
            presets=", ".join(f"`{name}`" for name in PRESETS),
            left=", ".join(f"`{pattern}`" for pattern in LEFT_TO_DEEPSPEED),
            aliases="\n".join(f"| `{alias}` | `{key}` |" for alias, key in ALIASES.items()),
        )
    )


def _row(rule: Rule) -> str:
    stage = f", from stage {rule.from_stage}" if rule.from_stage else ""
    kind = ("must match" if rule.match else "fills") + stage
    return f"| `{rule.key}` | {kind} | {rule.value} | {rule.reads or '-'} | {rule.since} | {rule.absent.value} |\n"


if __name__ == "__main__":
    sys.stdout.write(render_reference())
