"""LightningCLI that makes Trainer and module as ``fit`` does, and then asks what DeepSpeed would get."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.cli import ArgsType, LightningArgumentParser
from typing_extensions import override

from lightning_zero.cli.zero_cli import ZeroCLI
from lightning_zero.config.foresee import Foreseen
from lightning_zero.strategies.foresight import foresee_fit as foresee

__all__ = ["JSON", "foresee_fit"]

JSON = "--json"
"""The flag that is for machines."""


class _ForeseeingCLI(ZeroCLI):
    _reads_checkpoint = False
    foreseen: Foreseen

    @override
    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_default_arguments_to_parser(parser)
        text = "Print JSON instead of a table: `config`, `origins` and `later`, or `errors`."
        parser.add_argument(JSON, action="store_true", default=argparse.SUPPRESS, help=text)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        super().parse_arguments(parser, args)
        self.settings["seed_everything"] = False  # nothing is drawn

    def fit(self, model: pl.LightningModule, **unused: Any) -> None:
        """Stands in the place of ``trainer.fit``, which LightningCLI would call."""
        self.foreseen = foresee(self.trainer, model)


def foresee_fit(words: Sequence[str]) -> Foreseen:
    """The config of a run that ``lightning-zero fit`` would start.

    Args:
        words: The arguments of ``fit``, and ``--json``, which changes nothing here.

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
