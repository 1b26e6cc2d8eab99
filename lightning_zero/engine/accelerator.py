"""Which accelerator DeepSpeed uses: a process-wide choice that must be made before deepspeed is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_zero.errors import ConfigError

_VARIABLE = "DS_ACCELERATOR"
_PROCESSES = "LOCAL_SIZE"  # as DeepSpeed's own launcher sets it
_SUPPORTED = ("cpu", "cuda")
_REASONS = {"mps": "DeepSpeed's ZeRO needs collectives that PyTorch does not offer on Apple GPUs"}


def select_accelerator(device_type: str, *, processes: int = 1) -> None:
    """Makes DeepSpeed use the device type of the run, and imports it.

    Args:
        device_type: ``torch.device.type`` of this rank: ``"cpu"`` or ``"cuda"``.
        processes: Processes on this host.

    Raises:
        ConfigError: The device type is not one that ZeRO runs on, deepspeed is not installed, or deepspeed was
            imported before with another accelerator.
    """
    if device_type not in _SUPPORTED:
        reason = _REASONS.get(device_type, f"only {' and '.join(_SUPPORTED)} are supported")
        raise ConfigError(
            f"ZeRO does not run on accelerator={device_type!r}: {reason}. Use accelerator='cpu' or 'cuda'."
        )
    if device_type == "cpu":
        # Without it, DeepSpeed's CPU accelerator starts `numactl` to count its devices, at every reduction.
        os.environ.setdefault(_PROCESSES, str(processes))
    _import_deepspeed(device_type)
    from deepspeed.accelerator import get_accelerator

    chosen = get_accelerator().device_name()
    if chosen != device_type:
        raise ConfigError(
            f"deepspeed was imported before the run with accelerator {chosen!r}, and the run uses {device_type!r}. "
            f"Set {_VARIABLE}={device_type} before the first import of deepspeed."
        )


def check_precision(config: Mapping[str, Any]) -> None:
    """Refuses a 16-bit type that the selected accelerator cannot compute with.

    Args:
        config: A resolved config.

    Raises:
        ConfigError: The type, and the precision to use instead.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    supported = {"fp16": accelerator.is_fp16_supported, "bf16": accelerator.is_bf16_supported}
    for section, remedy in (("fp16", "precision='bf16-mixed'"), ("bf16", "precision='16-mixed' or '32-true'")):
        if config.get(section, {}).get("enabled") is True and not supported[section]():
            raise ConfigError(f"This {accelerator.device_name()} cannot compute in {section}. Use {remedy}.")


def _import_deepspeed(device_type: str) -> None:
    if sys.modules.get("deepspeed") is not None:
        return
    with environment({_VARIABLE: device_type}):
        try:
            import deepspeed  # noqa: F401  # the import is the point: it reads the variable
        except ModuleNotFoundError as missing:
            if missing.name != "deepspeed":
                raise
            raise ConfigError("deepspeed is not installed. Install it with `pip install deepspeed`.") from missing


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Environment variables that foreign code reads, set for the length of one call."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
