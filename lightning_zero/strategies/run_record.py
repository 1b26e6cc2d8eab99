"""What a run leaves beside its logs: the config that DeepSpeed got."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.fabric.utilities.cloud_io import get_filesystem

from lightning_zero.config.resolve import ResolvedConfig
from lightning_zero.export.atomic import staged_file, write_text

if TYPE_CHECKING:
    import lightning.pytorch as pl

FILE_NAME = "deepspeed_config.json"


def write_record(resolved: ResolvedConfig, trainer: pl.Trainer) -> None:
    """Writes a resolved config to ``deepspeed_config.json`` in the folder of the Trainer's first logger. Collective.

    The file can be given as ``config=`` and resolves to the same config in the same run. Without a logger, or with
    ``fast_dev_run``, nothing is written.

    Args:
        resolved: The config.
        trainer: The Trainer of the run.
    """
    if not trainer.loggers:
        return
    folder = trainer.log_dir  # None for the silent logger of fast_dev_run
    if folder is None or not trainer.is_global_zero:
        return
    text = json.dumps(resolved.config, indent=2) + "\n"
    if "://" in folder:  # an object store, which shows whole objects only
        get_filesystem(folder).pipe_file(f"{folder}/{FILE_NAME}", text.encode())
        return
    with staged_file(Path(folder) / FILE_NAME) as hidden:
        write_text(hidden, text)
