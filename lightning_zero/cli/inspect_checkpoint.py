"""Say what a checkpoint holds, without reading its weights."""

from __future__ import annotations

from collections.abc import Iterator

from jsonargparse import ArgumentParser, Namespace

from lightning_zero.checkpoint.manifest import Manifest, SavedTensor
from lightning_zero.checkpoint.verify import inspect_checkpoint
from lightning_zero.cli.output import console, table

__all__ = ["add_arguments", "facts", "run"]


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments.

    Args:
        parser: The subcommand's parser.
    """
    parser.add_argument(
        "checkpoint", type=str, help="a sharded checkpoint's folder, or a Lightning, torch or safetensors file"
    )
    parser.add_argument("--tag", type=str | None, default=None, help="which tag of a sharded checkpoint")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")


def run(options: Namespace) -> int:
    """Print the facts.

    Args:
        options: The parsed arguments.

    Returns:
        The exit code.
    """
    manifest = inspect_checkpoint(options.checkpoint, tag=options.tag)
    console().print(table(facts(manifest)))
    console().print()
    console().print(table(((file.name, size(file.size)) for file in manifest.files), ("file", "size")))
    if options.tensors:
        rows = ((item.name, _shape(item), _dtype(item), _role(item)) for item in manifest.tensors)
        console().print(table(rows, ("tensor", "shape", "dtype", "role")))
    return 0


def facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """A checkpoint in a few lines.

    Args:
        manifest: What it holds.

    Yields:
        Subject and value.
    """
    yield "checkpoint", str(manifest.path)
    yield "kind", manifest.kind
    if manifest.kind == "sharded":
        yield "tag", str(manifest.tag)
        yield "stage, ranks", f"{manifest.stage}, {manifest.world_size}"
        yield "weights", "fp32 copies of the optimizer" if manifest.has_masters else "as the module held them"
    yield "optimizer state", "yes" if manifest.has_optimizer else "no"
    yield "tensors", f"{len(manifest.tensors)} ({len(manifest.aliases)} tied), {manifest.numel:,} elements"
    yield "size", size(manifest.size)
    known = {
        "step": manifest.step,
        "epoch": manifest.epoch,
        "deepspeed": manifest.deepspeed_version,
        "lightning": manifest.lightning_version,
        "transformers files": manifest.transformers_files,
        "left out": ", ".join(manifest.left_out) or None,
    }
    yield from ((name, str(value)) for name, value in known.items() if value is not None)


def size(count: int) -> str:
    """Bytes as people say them.

    Args:
        count: Bytes.
    """
    for unit, power in (("GB", 3), ("MB", 2), ("kB", 1)):
        if count >= 1000**power:
            return f"{count / 1000**power:.1f} {unit}"
    return f"{count} B"


def _shape(item: SavedTensor) -> str:
    return "x".join(map(str, item.shape)) or "scalar"


def _dtype(item: SavedTensor) -> str:
    return str(item.dtype).removeprefix("torch.")


def _role(item: SavedTensor) -> str:
    return item.role if item.alias_of is None else f"{item.role}, tied to {item.alias_of}"
