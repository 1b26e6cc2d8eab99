"""LightningCLI with the strategy names, and with errors that name the place in the YAML."""

from __future__ import annotations

import argparse
import inspect
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from jsonargparse import ArgumentError, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from typing_extensions import override

from lightning_zero.checkpoint.layout import locate
from lightning_zero.cli.failures import DEBUG, exit_code_of
from lightning_zero.cli.parse_errors import explained
from lightning_zero.config.keys import nearest
from lightning_zero.errors import CheckpointError, ConfigError

_CHECKPOINTS_BY_WORD = ("best", "last", "hpc", "registry")
_PLACE_OF_SAVE = 2  # of save_config_callback among the arguments


class _SaveBesideLogs(SaveConfigCallback):
    """Saves the YAML of a run beside its logs; without a logger it would be where the program was started."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)


class ZeroCLI(LightningCLI):
    """LightningCLI whose Trainer knows the ZeRO strategy names.

    Called without ``args``, it is a program: what is refused ends it with one message, which names the place in the
    YAML or on the command line, and with exit code 2; ``--debug`` shows the traceback. Called with ``args``, it raises.

    Args:
        *positional: As of :class:`lightning.pytorch.cli.LightningCLI`. Without a model class the YAML names one by
            ``class_path``, and so for the data module.
        args: Words to parse, or a configuration; ``None``: the words of the command line.
        **keywords: As of :class:`lightning.pytorch.cli.LightningCLI`.

    Raises:
        ConfigError: With ``args``, when a value does not fit.
    """

    _reads_checkpoint = True
    _refusal: ConfigError | None = None

    def __init__(self, *positional: Any, args: ArgsType = None, **keywords: Any) -> None:
        if len(positional) <= _PLACE_OF_SAVE:
            keywords.setdefault("save_config_callback", _SaveBesideLogs)
        keywords["parser_kwargs"] = {"exit_on_error": False, **(keywords.get("parser_kwargs") or {})}

        def start(words: ArgsType) -> int:
            try:
                super(ZeroCLI, self).__init__(*positional, **keywords, args=words)  # type: ignore[misc]  # never twice
            except SystemExit:  # how Lightning ends a run that was told to stop; the processes were told as well
                raise
            except BaseException:
                self._end_processes()
                raise
            return 0

        if args is not None:
            start(args)
            return
        code = exit_code_of(lambda: start(None), Path(sys.argv[0]).name, debug=DEBUG in sys.argv)
        if code:
            raise SystemExit(code)

    @override
    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_default_arguments_to_parser(parser)
        text = "Show the traceback of an error."
        parser.add_argument(DEBUG, action="store_true", default=argparse.SUPPRESS, help=text)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        try:
            if isinstance(args, (dict, Namespace)):
                self.config = parser.parse_object(args)
            else:
                self.config = parser.parse_args(args)
        except ArgumentError as error:
            known = {
                "trainer": _parameters(self.trainer_class),
                "model": _parameters(self.model_class),
                "data": _parameters(self.datamodule_class),
            }
            raise ConfigError(explained(str(error), known)) from error
        self.settings.pop("debug", None)  # a saved config is for any LightningCLI
        name = self.settings.get("trainer.strategy")
        names = StrategyRegistry.available_strategies()
        if isinstance(name, str) and name not in ("auto", *names):
            near = nearest(name, names, cutoff=0.5)
            hint = f"Write {near}." if near else f"Write one of {', '.join(names)}."
            if name.startswith("["):
                hint = "It is a list; write one name, or a class_path with its init_args."
            raise ConfigError(f"trainer.strategy: there is none named {name}. {hint}")
        path = self.settings.get("ckpt_path")
        if self._reads_checkpoint and path is not None and path not in _CHECKPOINTS_BY_WORD and "://" not in str(path):
            try:
                locate(path)  # a run would find out when the processes have started and the model is built
            except CheckpointError as error:
                raise type(error)(f"ckpt_path: {error}") from error

    @override
    def before_instantiate_classes(self) -> None:
        """Lets errors of strategies and callbacks name the YAML."""
        self.parser.add_instantiator(self._saying_where("trainer.strategy.init_args"), Strategy)
        self.parser.add_instantiator(self._saying_where("trainer.callbacks"), Callback)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        try:
            return super().instantiate_trainer(**kwargs)
        except ConfigError:
            raise
        except (TypeError, ValueError, MisconfigurationException) as error:
            raise ConfigError(f"trainer: {error}") from error  # Lightning tells of a wrong flag in any of these

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:
            if self._refusal is not None:  # jsonargparse goes on to other types, and ends with what it says of them all
                raise self._refusal from error
            raise

    @property
    def settings(self) -> Namespace:
        """What was parsed, without the subcommand around it."""
        command = self.config.get("subcommand")
        settings: Namespace = self.config[command] if command else self.config
        return settings

    def _saying_where(self, place: str) -> Callable[..., Any]:
        def instantiate(kind: type, *args: Any, **kwargs: Any) -> Any:
            try:
                return kind(*args, **kwargs)
            except ConfigError as error:
                self._refusal = type(error)(f"{place}: {error}")
                raise

        return instantiate

    def _end_processes(self) -> None:
        """Ends the processes that Lightning has started, which would wait for the one that has failed.

        As Lightning does after an interrupt: a run's handler of SIGTERM only takes note of it.
        """
        trainer = vars(self).get("trainer")
        launcher = trainer.strategy.launcher if trainer is not None else None
        if launcher is not None:
            launcher.kill(signal.SIGKILL)


def _parameters(made: Callable[..., Any] | None) -> list[str]:
    return [] if made is None else list(inspect.signature(made).parameters)
