"""Whole 16-bit weights, written while and after a run trains."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_zero.callbacks.best_model import BestModelCheckpoint
from lightning_zero.checkpoint.publish import remove
from lightning_zero.errors import ConfigError
from lightning_zero.strategies.checkpointed import CheckpointedStrategy
from lightning_zero.strategies.checkpoints import local_path
from lightning_zero.strategies.gathered import choose


class GatheredWeightsCheckpoint(Callback):
    """Writes folders of whole weights, which other programs read, at every ZeRO stage.

    A LightningModule that holds one transformers model gives a folder that ``from_pretrained`` reads; any other gives
    ``model.safetensors``. These folders cannot be resumed from.

    Args:
        dirpath: The folder. The save at the end of training is ``dirpath`` itself, those in between are
            ``dirpath/step-<n>``, after n updates.
        which: What is written at the end: ``"best"``, the weights that :class:`BestModelCheckpoint` has put back;
            ``"last"``, those after the last update; ``None``: the best if they are put back, else the last.
        every_n_epochs: Epochs between saves; ``None``: none.
        every_n_train_steps: Updates between saves; ``None``: none.
        save_on_train_end: Whether there is a save at the end.
        keep_last: How many of the saves in between are kept; ``None``: all.
        dtype: Of every floating-point tensor; ``"auto"``: the run's 16-bit type, bfloat16 under ``32-true``.
        module: Name of the part of the LightningModule to write; ``""``: all of it. ``None``: its transformers model,
            if it holds one, else all of it.
        max_shard_size: Most bytes in one file, such as ``"5GB"``.
        exclude_frozen: Leave frozen parameters out, as for adapters.
        tokenizer: A tokenizer or processor to save beside the weights.

    Raises:
        ConfigError: An argument is wrong, or nothing would ever be written.
    """

    def __init__(
        self,
        dirpath: str | PathLike[str],
        which: Literal["best", "last"] | None = None,
        every_n_epochs: int | None = None,
        every_n_train_steps: int | None = None,
        save_on_train_end: bool = True,
        keep_last: int | None = None,
        dtype: torch.dtype | str | None = "auto",
        module: str | None = None,
        max_shard_size: int | str = "5GB",
        exclude_frozen: bool = False,
        tokenizer: Any = None,
    ) -> None:
        if which not in ("best", "last", None):
            raise ConfigError(f"which={which!r} is not known. Pass 'best' or 'last'.")
        for name, value in (
            ("every_n_epochs", every_n_epochs),
            ("every_n_train_steps", every_n_train_steps),
            ("keep_last", keep_last),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1. Leave it out instead.")
        if not (save_on_train_end or every_n_epochs or every_n_train_steps):
            raise ConfigError(
                "GatheredWeightsCheckpoint would never write. Pass every_n_epochs=, every_n_train_steps= or "
                "save_on_train_end=True."
            )
        self.dirpath = Path(local_path(dirpath))
        self.which = which
        self.every_n_epochs = every_n_epochs
        self.every_n_train_steps = every_n_train_steps
        self.save_on_train_end = save_on_train_end
        self.keep_last = keep_last
        self.module = module
        self._options: dict[str, Any] = {
            "dtype": dtype,
            "module": module,
            "max_shard_size": max_shard_size,
            "exclude_frozen": exclude_frozen,
            "tokenizer": tokenizer,
        }
        self._saved: list[str] = []

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(dirpath=str(self.dirpath), which=self.which, module=self.module)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"saved": self._saved}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = list(state_dict["saved"])

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, CheckpointedStrategy):
            raise ConfigError(
                f"GatheredWeightsCheckpoint gathers from ZeRO engines, and this run has "
                f"{type(trainer.strategy).__name__}. Use Trainer(strategy='zero2') or another ZeRO name."
            )
        if self.which == "best" and not _best_is_put_back(trainer):
            raise ConfigError(
                "GatheredWeightsCheckpoint(which='best') needs the best weights back in the model. "
                "Add BestModelCheckpoint(monitor=...) to the callbacks, or pass which='last'."
            )

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        choose(pl_module, self.module)  # now rather than after the training

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.every_n_train_steps and trainer.global_step % self.every_n_train_steps == 0:
            self._save_between(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._save_between(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Checkpoint callbacks come after all others, so that the best weights are not back yet.
        if self.which == "last":
            self._save_at_end(trainer)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # After every callback's on_train_end, in whatever order they are listed; the engine lives on after fit.
        if self.which != "last":
            self._save_at_end(trainer)

    def _save_between(self, trainer: pl.Trainer) -> None:
        name = f"step-{trainer.global_step}"
        if trainer.global_step == 0 or name in self._saved[-1:] or _only_tries(trainer):
            return  # the batch was no update, or the other interval has saved
        self._save(trainer, self.dirpath / name)
        self._saved = [*(saved for saved in self._saved if saved != name), name]
        while self.keep_last is not None and len(self._saved) > self.keep_last:
            old = self._saved.pop(0)
            if trainer.is_global_zero:
                remove(self.dirpath / old)

    def _save_at_end(self, trainer: pl.Trainer) -> None:
        if self.save_on_train_end and not _only_tries(trainer):
            self._save(trainer, self.dirpath)

    def _save(self, trainer: pl.Trainer, path: Path) -> None:
        assert isinstance(trainer.strategy, CheckpointedStrategy)
        trainer.strategy.save_gathered_weights(path, **self._options)


def _best_is_put_back(trainer: pl.Trainer) -> bool:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # the Trainer sets it when it starts
    return any(isinstance(c, BestModelCheckpoint) and c.load_best_model_at_end for c in callbacks)


def _only_tries(trainer: pl.Trainer) -> bool:
    return bool(vars(trainer).get("fast_dev_run"))  # the Trainer declares it nowhere
