"""The folder on an NVMe drive that DeepSpeed swaps to: usable, and this process's alone."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn import Module

from lightning_zero.engine.partition import numel
from lightning_zero.engine.state import all_errors
from lightning_zero.errors import ConfigError

_SUBFOLDER = "zero_stage_3"  # DeepSpeed's
_FP32_BYTES = 12  # of each parameter's master weight and Adam's two moments
_held: dict[Path, int] = {}  # locks of this process, which end with it


def claim_swap_folders(config: Mapping[str, Any]) -> None:
    """Makes sure that this rank can swap, and that no other run swaps to the same files. Collective.

    DeepSpeed clears a rank's files when a run starts, whoever is using them.

    Args:
        config: A resolved config.

    Raises:
        ConfigError: A folder cannot be written to, its file system has no direct I/O, it is full, or another run on
            this host uses it; on all ranks.
    """
    folders = _folders(config)
    if not folders:
        return
    error = next((text for text in map(_claim, folders) if text is not None), None)
    _refuse(all_errors(error))


def refuse_too_little_room(module: Module, config: Mapping[str, Any]) -> None:
    """Makes sure that the optimizer states of a module fit on the drive. Collective.

    Args:
        module: The module to train.
        config: A resolved config.

    Raises:
        ConfigError: There is too little room, on some host.
    """
    folder = _folder(config, "offload_optimizer")
    if folder is None:
        return
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    count = sum(numel(parameter) for parameter in module.parameters() if parameter.requires_grad)
    needed = count * _FP32_BYTES * hosts.count(socket.gethostname()) // len(hosts)
    drive = os.statvfs(folder)
    free = drive.f_bavail * drive.f_frsize
    error = None
    if free < needed:
        error = (
            f"nvme_path={str(folder)!r} has {free / 1e9:.1f} GB left, and the optimizer states of {count:,} parameters "
            f"need {needed / 1e9:.1f} GB on this host. Free some, or use a larger drive."
        )
    _refuse(all_errors(error))


def _refuse(errors: list[tuple[int, str]]) -> None:
    if errors:
        rank, text = errors[0]
        raise ConfigError(f"rank {rank}: {text}")


def _folders(config: Mapping[str, Any]) -> list[Path]:
    found = (_folder(config, section) for section in ("offload_optimizer", "offload_param"))
    return list(dict.fromkeys(folder for folder in found if folder is not None))


def _folder(config: Mapping[str, Any], section: str) -> Path | None:
    zero = config.get("zero_optimization") or {}
    offload = zero.get(section) or {}
    return Path(offload["nvme_path"]) if zero.get("stage") == 3 and offload.get("device") == "nvme" else None


def _claim(folder: Path) -> str | None:
    swap = folder / _SUBFOLDER
    try:
        swap.mkdir(parents=True, exist_ok=True)
        _write_directly(swap / f"trial{dist.get_rank()}")
        return _lock(swap / f"rank{dist.get_rank()}.lock", folder)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return (
                f"nvme_path={str(folder)!r}: its file system has no direct I/O, which swapping needs. "
                "Choose a folder on a local NVMe drive."
            )
        return f"nvme_path={str(folder)!r} cannot be written to: {error}. Choose another folder, or make room."


def _write_directly(path: Path) -> None:
    """Writes and deletes one block past the page cache, as DeepSpeed does."""
    with mmap.mmap(-1, mmap.PAGESIZE) as block:  # a mapping begins at a whole page
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            os.write(descriptor, block)
        finally:
            os.close(descriptor)
            path.unlink()


def _lock(path: Path, folder: Path) -> str | None:
    if path in _held:
        return None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return None  # a file system without locks
        return (
            f"nvme_path={str(folder)!r} is in use by another run on this host, whose files this one would delete. "
            "Give each run a folder of its own."
        )
    _held[path] = descriptor
    return None
