"""The subcommands, and how an error ends the program."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from jsonargparse import ArgumentParser, Namespace

from lightning_zero.errors import ZeroError

__all__ = ["Subcommand", "main"]

_MODULES = {
    "inspect": "lightning_zero.cli.inspect_checkpoint",
    "verify": "lightning_zero.cli.verify",
    "consolidate": "lightning_zero.cli.consolidate",
}


class Subcommand(Protocol):
    """What a subcommand's module has beside its docstring, whose first line is the help."""

    __doc__: str | None

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the arguments."""

    def run(self, options: Namespace) -> int:
        """Do it, and return the exit code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        arguments: Words after the program's name; default: those of the process.

    Returns:
        The exit code: 0, 1 for a damaged checkpoint, 2 for anything else that was refused, 130 after an interrupt.
    """
    parser = ArgumentParser(prog="lightning-zero", description="DeepSpeed ZeRO for PyTorch Lightning.")
    subcommands = parser.add_subcommands(required=True, dest="command")
    modules = {name: cast(Subcommand, importlib.import_module(path)) for name, path in _MODULES.items()}
    for name, module in modules.items():
        summary = (module.__doc__ or "").strip()
        subparser = ArgumentParser(description=summary)
        module.add_arguments(subparser)
        subcommands.add_subcommand(name, subparser, help=summary.splitlines()[0])
    options = parser.parse_args(arguments)
    try:
        return modules[options.command].run(options[options.command])
    except ZeroError as error:
        print(f"lightning-zero {options.command}: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130
