"""``fit``, ``validate``, ``test`` and ``predict``: LightningCLI over any LightningModule, from a YAML."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["COMMANDS", "find_the_users_code", "run"]

COMMANDS = {
    "fit": "Train a LightningModule that a YAML names.",
    "validate": "Run its validation on a checkpoint.",
    "test": "Run its test on a checkpoint.",
    "predict": "Run its prediction on a checkpoint.",
}


def run(words: Sequence[str]) -> int:
    """Run a command of LightningCLI.

    Args:
        words: The command and its arguments.

    Returns:
        The exit code.
    """
    from lightning_zero.cli.progress_lines import ProgressLines
    from lightning_zero.cli.zero_cli import ZeroCLI

    find_the_users_code()
    callbacks = [] if sys.stdout.isatty() else [ProgressLines()]
    ZeroCLI(
        args=list(words),
        trainer_defaults={"callbacks": callbacks},
        parser_kwargs={"prog": "lightning-zero", "description": "DeepSpeed ZeRO for PyTorch Lightning."},
    )
    return 0


def find_the_users_code() -> None:
    """Lets a ``class_path`` name a module of the folder that the program was started in, as ``python -m`` does."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
