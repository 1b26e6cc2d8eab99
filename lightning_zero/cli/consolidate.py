"""Write the whole weights of a sharded checkpoint to a format that others read."""

from __future__ import annotations

from typing import Literal

from jsonargparse import ArgumentParser, Namespace

from lightning_zero.checkpoint.consolidate import consolidate
from lightning_zero.cli.output import console, progress_bar

__all__ = ["add_arguments", "run"]


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments.

    Args:
        parser: The subcommand's parser.
    """
    formats = Literal["transformers", "safetensors", "lightning", "torch"]
    dtypes = Literal["float32", "bfloat16", "float16"]
    parser.add_argument(
        "checkpoint", type=str, help="a sharded checkpoint's folder, or a Lightning, torch or safetensors file"
    )
    parser.add_argument("output", type=str, help="a folder for transformers and safetensors, else a file")
    parser.add_argument("--format", type=formats, default="transformers", help="what reads it")
    parser.add_argument(
        "--dtype", type=dtypes | None, default=None, help="of every weight; default: as in the optimizer"
    )
    parser.add_argument("--max_shard_size", type=str, default="5GB", help="most bytes in one safetensors file")
    parser.add_argument(
        "--strip_prefix", type=str | None, default=None, help="removed from the names, such as 'model.'"
    )
    parser.add_argument("--tag", type=str | None, default=None, help="which tag of a sharded checkpoint")


def run(options: Namespace) -> int:
    """Consolidate.

    Args:
        options: The parsed arguments.

    Returns:
        The exit code.
    """
    with progress_bar("consolidating") as progress:
        output = consolidate(
            options.checkpoint,
            options.output,
            format=options.format,
            dtype=options.dtype,
            max_shard_size=options.max_shard_size,
            strip_prefix=options.strip_prefix,
            tag=options.tag,
            progress=progress,
        )
    console().print(f"wrote {output}")
    return 0
