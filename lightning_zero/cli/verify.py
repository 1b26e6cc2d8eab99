"""Check that a checkpoint is whole; exit with 1 and the reason when it is not."""

from __future__ import annotations

import sys

from jsonargparse import ArgumentParser, Namespace

from lightning_zero.checkpoint.layout import locate
from lightning_zero.checkpoint.verify import verify_checkpoint
from lightning_zero.cli.inspect_checkpoint import facts
from lightning_zero.cli.output import console, table
from lightning_zero.errors import CheckpointError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments.

    Args:
        parser: The subcommand's parser.
    """
    parser.add_argument(
        "checkpoint", type=str, help="a sharded checkpoint's folder, or a Lightning, torch or safetensors file"
    )
    parser.add_argument("--tag", type=str | None, default=None, help="which tag of a sharded checkpoint")
    parser.add_argument("--deep", action="store_true", help="read every byte and compare checksums, too")


def run(options: Namespace) -> int:
    """Check, and print the facts or the faults.

    Args:
        options: The parsed arguments.

    Returns:
        The exit code: 1 when the checkpoint is damaged.
    """
    locate(options.checkpoint, options.tag)  # a path that is no checkpoint is the caller's mistake, not damage
    try:
        manifest = verify_checkpoint(options.checkpoint, tag=options.tag, deep=options.deep)
    except CheckpointError as error:
        print(f"lightning-zero verify: {error}", file=sys.stderr)  # noqa: T201
        return 1
    console().print(table(facts(manifest)))
    console().print("whole" if options.deep else "whole, as far as can be told without reading every byte (--deep)")
    return 0
