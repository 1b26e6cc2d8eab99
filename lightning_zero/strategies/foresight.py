"""What a Trainer's fit would give DeepSpeed, before anything is started or built."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from lightning_zero.config.foresee import Foreseen
from lightning_zero.errors import ConfigError
from lightning_zero.strategies import checks
from lightning_zero.strategies.trainer import ZeroStrategy


def foresee_fit(trainer: pl.Trainer, module: pl.LightningModule) -> Foreseen:
    """The config as far as it is known without loaders, model and optimizer. No hook of the module is called.

    Args:
        trainer: A Trainer that has not run.
        module: The module that it would fit.

    Raises:
        ConfigError: Config and run contradict each other, a callback does not work under ZeRO, or the strategy is none
            of ours.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, ZeroStrategy):
        raise ConfigError(
            f"trainer.strategy: is {type(strategy).__name__}, which has no DeepSpeed config of this package. "
            "Write a name such as zero2, or lightning_zero.ZeroStrategy."
        )
    trainer.state.fn = TrainerFn.FITTING
    strategy.connect(module)
    foreseen = strategy.run_config.foresee(trainer)
    checks.callbacks(trainer)
    checks.checkpoint_writer(foreseen.resolved.config)
    return foreseen
