"""The half of the Trainer's strategy that saves and loads."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero._compat import lightning as _lightning
from lightning_zero.checkpoint.layout import CLIENT_STATE_KEY
from lightning_zero.checkpoint.publish import remove
from lightning_zero.engine.session import EngineSession
from lightning_zero.engine.state import set_rng_state
from lightning_zero.errors import CheckpointError
from lightning_zero.export.options import parse_dtype
from lightning_zero.strategies import checkpoints, checks, gathered
from lightning_zero.strategies.marked import MarkedStrategy
from lightning_zero.strategies.meeting import meet
from lightning_zero.strategies.resuming import resume_sharded


class CheckpointedStrategy(MarkedStrategy):
    """Saves shards or whole weights, and loads whatever a path stands for."""

    elastic: bool
    _session: EngineSession | None = None
    _saved_between_batches: dict[str, Any] | None = None  # our part of the checkpoint that a run goes on from

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | PathLike[str], storage_options: Any = None
    ) -> None:
        """Saves the run, or its weights alone when Lightning's part holds no optimizer. Collective.

        Args:
            checkpoint: Lightning's part.
            filepath: A folder for a whole checkpoint, a file for weights alone. What is there lives until the new one
                is whole.
            storage_options: Not supported.

        Raises:
            CheckpointError: It could not be written; an earlier one of that name is untouched.
        """
        checks.no_storage_options(storage_options)
        if self._interrupted:
            rank_zero_warn(f"{filepath} is not saved: this rank was interrupted, and the others may not be saving.")
            return
        meet(filepath, call="trainer.save_checkpoint")
        filepath = self.broadcast(filepath)
        if "optimizer_states" not in checkpoint:
            assert self.lightning_module is not None
            checkpoints.save_weights(self.lightning_module, checkpoint, filepath, masters=self._masters)
            return
        ours = {"epoch_ended": _lightning.epoch_has_ended(self._trainer)}
        checkpoints.save_sharded(
            self._running,
            {**checkpoint, CLIENT_STATE_KEY: ours},
            filepath,
            exclude_frozen=self.exclude_frozen_parameters,
        )

    @override
    def remove_checkpoint(self, filepath: str | PathLike[str]) -> None:
        if self.is_global_zero:
            remove(Path(filepath))

    @override
    def load_checkpoint(self, checkpoint_path: str | PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
        """Loads what a path stands for; the weights too, when they come with optimizer states. Collective.

        Raises:
            CheckpointError: The checkpoint is damaged or does not fit; on all ranks, before anything is changed.
        """
        assert self.lightning_module is not None
        opened = checkpoints.open_checkpoint(checkpoint_path)
        fitting = self._trainer.state.fn == TrainerFn.FITTING
        if not (fitting and opened.location.kind == "sharded"):
            return checkpoints.lightning_state(opened, weights_only)
        loaded = self._resume(opened)
        restored = checkpoints.for_trainer(loaded)
        self._saved_between_batches = restored.get(CLIENT_STATE_KEY)
        return restored

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if "state_dict" in checkpoint:  # else the engine has loaded it
            assert self.lightning_module is not None
            checkpoints.set_state_dict(
                self.lightning_module,
                checkpoint["state_dict"],
                strict=strict,
                where="The checkpoint",
                masters=self._masters,
            )

    def load_weights(self, path: str | PathLike[str], *, strict: bool = True, module: str | None = None) -> None:
        """Starts from the weights of a checkpoint, with a fresh optimizer, at any stage. Collective.

        Args:
            path: A sharded folder, a single file, or a folder that ``save_pretrained`` wrote.
            strict: Whether names must be equal.
            module: Name of the part of the LightningModule to load into; ``None``: all of it.

        Raises:
            CheckpointError: The weights do not fit, or the checkpoint is damaged; nothing has been changed.
        """
        if self.lightning_module is None or not dist.is_initialized():
            raise CheckpointError(
                "load_weights has no module to load into before a run starts. Call it in "
                "`LightningModule.on_fit_start`, or after `trainer.fit`."
            )
        target: Module = self.lightning_module if module is None else self.lightning_module.get_submodule(module)
        if self._session is not None and not self._session.evaluate:
            self._session.window.clear()
        checkpoints.load_weights(target, path, strict=strict, masters=self._masters)

    def load_best(self, path: str | PathLike[str], *, weights_only: bool) -> None:
        """Loads an earlier checkpoint of the run into its engine, at the end of training. Collective.

        Args:
            path: The checkpoint.
            weights_only: Leave the optimizer as it is, but for the fp32 weights.
        """
        if weights_only:
            self.load_weights(path)
            return
        self._resume(checkpoints.open_checkpoint(path))

    def save_gathered_weights(
        self,
        path: str | PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        module: str | None = None,
        max_shard_size: int | str = "5GB",
        exclude_frozen: bool = False,
        tokenizer: Any = None,
    ) -> None:
        """Writes whole weights to a folder, at any stage, also after ``fit``; no rank holds all. Collective.

        A LightningModule that holds one transformers model gives what that model's ``save_pretrained`` writes, which
        ``from_pretrained`` reads; one with PEFT's adapters around it gives the active adapter, which
        ``PeftModel.from_pretrained`` reads; any other gives ``model.safetensors`` with its state dict's names.

        Args:
            path: The folder, on a disk that all nodes share; it appears when it is whole.
            dtype: Of every floating-point tensor; ``"auto"``: the run's 16-bit type, bfloat16 under ``32-true``;
                ``None``: float32 where the engine has fp32 weights, else as they are.
            module: Name of the part of the LightningModule to write; ``""``: all of it. ``None``: its transformers
                model, if it holds one, else all of it.
            max_shard_size: Most bytes in one file, such as ``"5GB"``.
            exclude_frozen: Leave frozen parameters out, as for adapters; the folder then has no ``config.json``.
            tokenizer: A tokenizer or processor to save beside the weights.

        Raises:
            ConfigError: There is no such part, or several transformers models and no ``module``.
            CheckpointError: Some rank could not write, or not all called; on all ranks, and nothing is left.
        """
        if self.lightning_module is None or not dist.is_initialized():
            raise CheckpointError("save_gathered_weights needs a run. Call it inside or after one.")
        if self._interrupted:
            raise CheckpointError(f"{path} is not saved: this rank was interrupted, and the others may not be saving.")
        gathered.save_gathered(
            self.lightning_module,
            path,
            session=self._session,
            dtype=gathered.sixteen_bit(self.resolved.config) if dtype == "auto" else parse_dtype(dtype),
            name=module,
            max_shard_size=max_shard_size,
            exclude_frozen=exclude_frozen,
            tokenizer=tokenizer,
        )

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        """False: the shards hold the optimizer's state, and a single file's is not spread over them."""
        return False

    @override
    def barrier(self, name: str | None = None) -> None:
        if not self._interrupted:
            super().barrier(name)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: no rank builds a whole optimizer state, each saves its own shard with the checkpoint."""
        return {}

    def _resume(self, opened: checkpoints.Opened) -> dict[str, Any]:
        assert self.lightning_module is not None
        self._running.window.clear()
        return resume_sharded(
            self._running,
            opened,
            strict=self.lightning_module.strict_loading,
            exclude_frozen=self.exclude_frozen_parameters,
            elastic=self.elastic,
            weights_call="trainer.strategy.load_weights(path)",
        )

    def _restore_random_numbers(self) -> None:
        """Goes on with the random numbers of the checkpoint, once the loader's iterator has been made."""
        saved = self._saved_between_batches
        if saved is None:
            return
        between_epochs = saved.get("epoch_ended", False)
        if not between_epochs and _lightning.loaders_are_to_be_made(self._trainer):
            return  # asked again before the first batch
        set_rng_state(saved.get("rng", []))
        if between_epochs:
            _lightning.draw_as_a_new_iterator(self._trainer)
        self._saved_between_batches = None

    @property
    def _interrupted(self) -> bool:
        """Whether an exception ended the run on this rank, so that nothing collective can follow."""
        module = self.lightning_module
        if module is None or self.world_size == 1 or module._trainer is None:
            return False
        return module._trainer.state.status == TrainerStatus.INTERRUPTED

    @property
    def _masters(self) -> dict[Parameter, Tensor]:
        return {} if self._session is None else self._session.masters

    @property
    def _running(self) -> EngineSession:
        if self._session is None or self._session.evaluate:
            raise CheckpointError("There is no training engine. Save and resume inside or after `trainer.fit`.")
        return self._session

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer
