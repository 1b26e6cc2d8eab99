"""The best checkpoint of a training, back in the model at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_zero.errors import ConfigError
from lightning_zero.strategies.checkpointed import CheckpointedStrategy


class BestModelCheckpoint(ModelCheckpoint):
    """Keeps the best checkpoints by a logged metric, and has the best one back in the model when training ends.

    Args:
        dirpath: Folder of the checkpoints.
        filename: Pattern of their names, as of :class:`lightning.pytorch.callbacks.ModelCheckpoint`.
        monitor: Name of the logged metric.
        mode: ``"min"`` or ``"max"``.
        load_best_model_at_end: ``True``: weights and optimizer states of the best checkpoint are in the live engine, on
            all ranks, when ``trainer.fit`` returns. ``"weights"``: the weights alone. ``False``: the last ones stay.
        save_only_model: Keep no optimizer states, as ``save_weights_only`` does.
        **kwargs: As of :class:`lightning.pytorch.callbacks.ModelCheckpoint`.

    Raises:
        ConfigError: No ``monitor``, or optimizer states are to be loaded and none are kept.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        *,
        mode: Literal["min", "max"] = "min",
        load_best_model_at_end: bool | Literal["weights"] = True,
        save_only_model: bool = False,
        **kwargs: Any,
    ) -> None:
        if load_best_model_at_end not in (True, False, "weights"):
            raise ConfigError(
                f"load_best_model_at_end={load_best_model_at_end!r} is not known. Pass True, False or 'weights'."
            )
        if monitor is None and load_best_model_at_end:
            raise ConfigError(
                "BestModelCheckpoint cannot tell which checkpoint is the best without a metric. "
                "Pass monitor='val_loss', or the name of another logged metric."
            )
        only_model = save_only_model or bool(kwargs.pop("save_weights_only", False))
        if only_model and load_best_model_at_end is True:
            said = "save_only_model" if save_only_model else "save_weights_only"
            raise ConfigError(
                f"{said}=True keeps no optimizer states for load_best_model_at_end=True to restore. "
                "Use load_best_model_at_end='weights', or keep them."
            )
        kwargs.update(monitor=monitor, mode=mode, save_weights_only=only_model)
        super().__init__(dirpath, filename, **kwargs)
        self.load_best_model_at_end = load_best_model_at_end

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.load_best_model_at_end and not isinstance(trainer.strategy, CheckpointedStrategy):
            raise ConfigError(
                f"BestModelCheckpoint loads into ZeRO engines, and this run has {type(trainer.strategy).__name__}. "
                "Use Trainer(strategy='zero2') or another ZeRO name, or Lightning's ModelCheckpoint."
            )
        super().setup(trainer, pl_module, stage)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if not self.load_best_model_at_end or vars(trainer).get("fast_dev_run"):  # the Trainer declares it nowhere
            return
        strategy = trainer.strategy
        assert isinstance(strategy, CheckpointedStrategy)
        # Metrics can differ between ranks; which checkpoint is the best is rank 0's decision.
        self.best_model_path, self.best_model_score = strategy.broadcast((self.best_model_path, self.best_model_score))
        if not self.best_model_path:
            rank_zero_warn(f"No checkpoint was saved by {self.monitor!r}, so the last weights stay in the model.")
            return
        strategy.load_best(self.best_model_path, weights_only=self.load_best_model_at_end == "weights")
        rank_zero_info(f"{self.best_model_path} is back in the model: {self.monitor} = {self.best_model_score}.")
