"""The subcommands, and how an error ends the program."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from jsonargparse import ArgumentParser, Namespace

from lightning_zero.cli import resolve, train
from lightning_zero.cli.failures import DEBUG, exit_code_of

__all__ = ["Subcommand", "main"]

_MODULES = {
    "inspect": "lightning_zero.cli.inspect_checkpoint",
    "verify": "lightning_zero.cli.verify",
    "consolidate": "lightning_zero.cli.consolidate",
    "presets": "lightning_zero.cli.presets",
}
# Their arguments are LightningCLI's, whose parser takes seconds to make.
_OF_LIGHTNING = {**dict.fromkeys(train.COMMANDS, train.run), "resolve": resolve.run}


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
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in words
    if words and words[0] in _OF_LIGHTNING:
        command = _OF_LIGHTNING[words[0]]
        return exit_code_of(lambda: command(words), f"lightning-zero {words[0]}", debug=debug)
    modules = {name: cast(Subcommand, importlib.import_module(path)) for name, path in _MODULES.items()}
    options = _parser(modules).parse_args(words)
    module = modules[options.command]
    return exit_code_of(lambda: module.run(options[options.command]), f"lightning-zero {options.command}", debug=debug)


def _parser(modules: dict[str, Subcommand]) -> ArgumentParser:
    parser = ArgumentParser(prog="lightning-zero", description="DeepSpeed ZeRO for PyTorch Lightning.")
    subcommands = parser.add_subcommands(required=True, dest="command")
    for name, text in {**train.COMMANDS, "resolve": resolve.SUMMARY}.items():
        subcommands.add_subcommand(name, ArgumentParser(), help=text)
    for name, module in modules.items():
        summary = (module.__doc__ or "").strip()
        subparser = ArgumentParser(description=summary)
        module.add_arguments(subparser)
        subparser.add_argument(DEBUG, action="store_true", help="show the traceback of an error")
        subcommands.add_subcommand(name, subparser, help=summary.splitlines()[0])
    return parser
