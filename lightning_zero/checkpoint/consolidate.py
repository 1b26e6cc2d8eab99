"""A checkpoint to whole weights: as a mapping, or written to a format that others read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_zero.checkpoint.merge import StoredTensor
from lightning_zero.checkpoint.shards import TensorRef
from lightning_zero.checkpoint.source import Source, open_path
from lightning_zero.checkpoint.unpickle import NOT_PLAIN, to_plain
from lightning_zero.errors import CheckpointError
from lightning_zero.export.atomic import staged_file, staged_folder
from lightning_zero.export.keys import common_prefix, rename_keys
from lightning_zero.export.lightning_file import write_lightning_file
from lightning_zero.export.options import parse_dtype, parse_size
from lightning_zero.export.safetensors_dir import STALE, SafetensorsWriter, TensorSpec, plan_safetensors
from lightning_zero.export.torch_file import write_torch_file
from lightning_zero.export.transformers_dir import copy_model_files, recorded_prefix

__all__ = ["Progress", "WholeWeights", "consolidate", "load_full_state_dict"]

Format = Literal["transformers", "safetensors", "lightning", "torch"]
Progress = Callable[[int, int], None]
"""Called with (bytes written, bytes in all), from one thread at a time."""

_CHUNK = 1 << 20  # elements converted and written at once: large enough for the disk, small enough to reuse memory
_THREADS = 4


class WholeWeights(Mapping[str, torch.Tensor]):
    """A state dict on disk: a tensor is read and put together when it is asked for.

    Tensors that lie in one piece in their file, in the dtype asked for, are mapped and take no memory of their own.
    Writing into one changes neither the file nor what the next access returns.

    Args:
        source: The opened checkpoint.
        dtype: Of every floating-point tensor, or None.
    """

    def __init__(self, source: Source, dtype: torch.dtype | None) -> None:
        self._source = source
        self._dtype = dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self._source.tensors[name]
        return stored.load().to(_exported_dtype(stored, self._dtype, self._source))

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.tensors)

    def __len__(self) -> int:
        return len(self._source.tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name; reads no tensor."""
        return {name: tuple(stored.shape) for name, stored in self._source.tensors.items()}

    @property
    def aliases(self) -> dict[str, str]:
        """Tied names: each later name with the first one."""
        return self._source.manifest.aliases


def load_full_state_dict(
    path: str | os.PathLike[str], *, tag: str | None = None, dtype: torch.dtype | str | None = None
) -> Mapping[str, torch.Tensor]:
    """Open a checkpoint as a state dict of whole tensors, read when asked for.

    Args:
        path: A sharded checkpoint's folder, a tag folder or shard in it, a Lightning, torch or safetensors file, or a
            folder of safetensors files.
        tag: Which tag of a sharded checkpoint; default: the one in its file ``latest``.
        dtype: Of every floating-point tensor. Default: float32 when the checkpoint has the optimizer's own fp32
            weights, else as stored.

    Returns:
        Tensors by name, with the names and order of ``module.state_dict()``.

    Raises:
        CheckpointNotFoundError: Nothing is there; names what is near.
        CheckpointError: Files are missing, damaged, stray or of different saves; names each of them.
    """
    return WholeWeights(open_path(path, tag), parse_dtype(dtype))


def consolidate(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    format: Format = "transformers",  # noqa: A002  # the word users say
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    strip_prefix: str | None = None,
    tag: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the whole weights of a checkpoint, in bounded memory.

    Args:
        path: As for :func:`load_full_state_dict`.
        output: A folder for ``transformers`` and ``safetensors``, a file for ``lightning`` and ``torch``. It appears
            when it is whole.
        format: ``transformers`` (a folder that ``from_pretrained`` reads), ``safetensors`` (a folder), ``lightning`` (a
            file that ``load_from_checkpoint`` opens) or ``torch`` (a state dict).
        dtype: Of every floating-point tensor; default: as for :func:`load_full_state_dict`.
        max_shard_size: Most bytes in one safetensors file, such as ``"5GB"``.
        strip_prefix: Removed from the names, such as ``"model."``; ``""`` for none. Default: for ``transformers``,
            where the checkpoint says the model sits, else the attribute under which every weight lies; for other
            formats none. With ``transformers``, weights outside the prefix are not the model's and are left out.
        tag: As for :func:`load_full_state_dict`.
        progress: Called with (bytes written, bytes in all) as the work goes on.

    Returns:
        ``output``.

    Raises:
        CheckpointError: The checkpoint cannot be read, or the format needs what it does not hold; names what is
            missing.
    """
    if format not in _WRITERS:
        raise CheckpointError(f"format={format!r} is unknown. Use one of {', '.join(_WRITERS)}.")
    target = Path(output)
    limit = parse_size(max_shard_size)
    wanted = parse_dtype(dtype)
    source = open_path(path, tag)
    if target.absolute() in (source.location.root, source.location.folder):
        raise CheckpointError(f"The output {target} is the checkpoint itself. Give another path.")
    renamed = _renamed(source, format, strip_prefix)
    task = _Task(source, renamed, wanted, limit, progress)
    _WRITERS[format](task, target)
    return target


def _renamed(source: Source, format_: str, strip_prefix: str | None) -> dict[str, str]:
    names = [*source.tensors, *source.extras]
    if format_ != "transformers":
        return rename_keys(names, strip_prefix or "", strip_compile=format_ != "lightning", only_below=False)
    home = source.location.transformers_files
    if home is None:
        raise CheckpointError(
            f"{source.location.root} has no transformers/config.json, which format='transformers' needs. "
            f"{_without_config(names)}"
        )
    prefix = strip_prefix if strip_prefix is not None else recorded_prefix(home)
    return rename_keys(names, common_prefix(names) if prefix is None else prefix, strip_compile=True, only_below=True)


def _without_config(names: Sequence[str]) -> str:
    if any(".lora_" in name for name in names):
        return (
            "It holds adapters: load it in a run and call `trainer.strategy.save_gathered_weights(path)`, which writes "
            "the folder that PeftModel.from_pretrained reads; or use format='safetensors' (--format safetensors)."
        )
    return "Put the model's config.json there, or use format='safetensors' (--format safetensors)."


def _exported_dtype(stored: StoredTensor, dtype: torch.dtype | None, source: Source) -> torch.dtype:
    """One floating dtype throughout: the one asked for, else fp32 beside fp32 masters, else each tensor's own."""
    if not stored.dtype.is_floating_point:
        return stored.dtype
    if dtype is not None:
        return dtype
    return torch.float32 if source.manifest.has_masters and stored.dtype.itemsize < 4 else stored.dtype


@dataclass
class _Task:
    """A consolidation: what to write under which name and dtype, and how far it is."""

    source: Source
    renamed: Mapping[str, str]
    dtype: torch.dtype | None
    max_shard_size: int
    progress: Progress | None

    def __post_init__(self) -> None:
        tensors = self.source.tensors
        aliases = self.source.manifest.aliases
        exported = {old: new for old, new in self.renamed.items() if old in tensors}
        owners = {old: aliases.get(old, old) for old in exported}
        # the first name may be outside the prefix: then the first one inside it owns the weight
        first: dict[str, str] = {}
        for old, owner in owners.items():
            first.setdefault(owner, old)
        self.owners = {exported[old]: exported[first[owner]] for old, owner in owners.items()}
        self.stored = {exported[old]: tensors[old] for old in first.values()}
        self.specs = {
            name: TensorSpec(name, tuple(stored.shape), _exported_dtype(stored, self.dtype, self.source))
            for name, stored in self.stored.items()
        }
        self.total = sum(spec.nbytes for spec in self.specs.values())
        self._done = 0

    @property
    def aliases(self) -> dict[str, str]:
        return {name: owner for name, owner in self.owners.items() if name != owner}

    def weights(self) -> dict[str, Any]:
        """The state dict with a spec for each tensor; tied names have the same spec."""
        plain, _ = _plain(
            {self.renamed[old]: value for old, value in self.source.extras.items() if old in self.renamed}
        )
        values = {name: self.specs[owner] for name, owner in self.owners.items()} | plain
        return {new: values[new] for new in self.renamed.values() if new in values}

    def pieces(self, name: str) -> Iterable[torch.Tensor]:
        for _, piece in self.stored[name].chunks(_CHUNK):
            yield piece
            self.advance(piece.numel() * self.specs[name].dtype.itemsize)

    def advance(self, count: int) -> None:
        self._done += count
        if self.progress is not None:
            self.progress(self._done, self.total)


def _write_safetensors(task: _Task, output: Path, model_files: Path | None = None) -> None:
    plan = plan_safetensors(task.specs.values(), task.max_shard_size, task.aliases)
    with staged_folder(output, STALE) as folder, SafetensorsWriter(plan, folder) as writer:
        writer.prepare()
        parts = ((name, start, piece) for name, stored in task.stored.items() for start, piece in stored.chunks(_CHUNK))
        threads = min(_THREADS, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads) as pool:
            for written in _bounded_map(pool, lambda part: writer.put(part[0], part[2], part[1]), parts, 2 * threads):
                task.advance(written)
        plan.write_index(folder)
        if model_files is not None:
            copy_model_files(model_files, folder, plan.main_dtype)


def _bounded_map(
    pool: ThreadPoolExecutor, work: Callable[[Any], int], items: Iterable[Any], ahead: int
) -> Iterator[int]:
    """Results in order, with at most ``ahead`` items under way."""
    waiting = []
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) >= ahead:
            yield waiting.pop(0).result()
    for future in waiting:
        yield future.result()


def _write_transformers(task: _Task, output: Path) -> None:
    _write_safetensors(task, output, task.source.location.transformers_files)


def _write_torch(task: _Task, output: Path) -> None:
    with staged_file(output) as path:
        write_torch_file(path, task.weights(), task.pieces)


def _write_lightning(task: _Task, output: Path) -> None:
    state, dropped = _plain(task.source.client_state)
    if dropped:
        warnings.warn(
            f"{output} leaves out what is not of plain types: {', '.join(dropped[:10])}. "
            "Pass it to load_from_checkpoint as an argument.",
            stacklevel=3,
        )
    with staged_file(output) as path:
        write_lightning_file(path, state, task.weights(), task.pieces)


def _plain(value: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    dropped: list[str] = []
    plain = to_plain(
        dict(value), lambda leaf: leaf.load().clone() if isinstance(leaf, TensorRef) else NOT_PLAIN, dropped
    )
    return plain, dropped


_WRITERS: dict[str, Callable[[_Task, Path], None]] = {
    "transformers": _write_transformers,
    "safetensors": _write_safetensors,
    "lightning": _write_lightning,
    "torch": _write_torch,
}
