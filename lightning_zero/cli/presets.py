"""List the shipped DeepSpeed configs, or print one of them to start from."""

from __future__ import annotations

import sys

from jsonargparse import ArgumentParser, Namespace

from lightning_zero.cli.output import console, table
from lightning_zero.config.presets import PRESETS, preset_text

__all__ = ["add_arguments", "run"]


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments.

    Args:
        parser: The subcommand's parser.
    """
    parser.add_argument("name", type=str | None, nargs="?", default=None, help="a name, to print its JSON")


def run(options: Namespace) -> int:
    """Print the names, or the JSON of one.

    Args:
        options: The parsed arguments.

    Returns:
        The exit code.
    """
    if options.name is not None:
        sys.stdout.write(preset_text(options.name))  # as it is, for a file
        return 0
    from lightning_zero.strategies.registry import NAMES

    console().print(table((name, NAMES[name]) for name in PRESETS))
    return 0
