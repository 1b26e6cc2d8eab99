"""LightningCLI that makes Trainer and module as ``fit`` does, and then asks what DeepSpeed would get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_zero.cli.zero_cli import ZeroCLI
from lightning_zero.config.foresee import Foreseen
from lightning_zero.strategies.foresight import foresee_fit as foresee

__all__ = ["foresee_fit"]


class _ForeseeingCLI(ZeroCLI):
    foreseen: Foreseen

    def fit(self, model: pl.LightningModule, **unused: Any) -> None:
        """Stands in the place of ``trainer.fit``, which LightningCLI would call."""
        self.foreseen = foresee(self.trainer, model)


def foresee_fit(words: Sequence[str]) -> Foreseen:
    """The config of a run that ``lightning-zero fit`` would start.

    Args:
        words: The arguments of ``fit``.

    Raises:
        ConfigError: The config contradicts the run, or the YAML is wrong.
    """
    cli = _ForeseeingCLI(
        args=["fit", *words],
        save_config_callback=None,
        seed_everything_default=False,
        parser_kwargs={"prog": "lightning-zero"},
    )
    return cli.foreseen
