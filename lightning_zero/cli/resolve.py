"""Print the DeepSpeed config of a run, and where each value comes from, without training."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_zero.cli.output import console, table
from lightning_zero.cli.train import find_the_users_code
from lightning_zero.config.explain import explain
from lightning_zero.errors import ConfigError

if TYPE_CHECKING:
    from lightning_zero.config.foresee import Foreseen

__all__ = ["SUMMARY", "run", "screen"]

SUMMARY = "Print the DeepSpeed config that `fit` would use, and where each value comes from, without training."


def run(words: Sequence[str]) -> int:
    """Print a table, or JSON with the keys ``config``, ``origins`` and ``later``.

    Args:
        words: The command and its arguments: those of ``fit``, and ``--json``.

    Returns:
        The exit code.

    Raises:
        ConfigError: The config contradicts the run, or the YAML is wrong; with ``--json`` printed, too.
    """
    from lightning_zero.cli.foreseeing_cli import JSON, foresee_fit

    find_the_users_code()
    as_json = JSON in words
    try:
        foreseen = foresee_fit(words[1:])
    except ConfigError as error:
        if as_json:
            _dump({"errors": str(error).splitlines()})
        raise
    if as_json:
        resolved = foreseen.resolved
        _dump({"config": resolved.config, "origins": resolved.origins, "later": foreseen.later})
        return 0
    out = console()
    wide = out.width if out.is_terminal else shutil.get_terminal_size((140, 0)).columns
    out.print(screen(foreseen, width=wide), markup=False, soft_wrap=True, end="")
    return 0


def screen(foreseen: Foreseen, *, width: int = 140) -> str:
    """What ``resolve`` prints.

    Args:
        foreseen: The config.
        width: Columns of the terminal.
    """
    text = explain(foreseen.resolved, width=width)
    for note in foreseen.resolved.notes:
        text += f"\n{note}\n"
    if foreseen.later:
        from rich.console import Console

        rows = io.StringIO()
        made = table(foreseen.later.items(), ("known when training starts", "decided by"))
        Console(file=rows, width=width, no_color=True, markup=False, highlight=False).print(made)
        text += "\n" + "\n".join(line.rstrip() for line in rows.getvalue().splitlines()) + "\n"
    return text


def _dump(value: object) -> None:
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")
