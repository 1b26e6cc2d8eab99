"""What ZeRO does during training, in the loggers."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero._compat.lightning import logs_this_batch
from lightning_zero.engine import gradients, usage
from lightning_zero.engine.session import EngineSession
from lightning_zero.errors import ConfigError
from lightning_zero.strategies.trainer import ZeroStrategy

_NORM = "grad_norm_before_clipping"


class ZeroMonitor(Callback):
    """Logs what ZeRO does, through the Trainer's loggers, in the updates that they log (``log_every_n_steps``).

    ========================================  =====================================================================
    ``zero/grad_norm_before_clipping``        norm of all gradients of the update; nan when it was skipped
    ``zero/loss_scale``                       under fp16
    ``zero/skipped_updates``                  updates that were skipped since the engine started
    ``zero/samples_per_second``               of all processes, since the last entry, without validation
    ``zero/tokens_per_second``                the same, where the batches have tokens
    ``zero/device_memory_gb``                 the most that tensors have taken on a CUDA device; the fullest one's
    ``zero/process_memory_gb``                resident memory of the largest process
    ``zero/host_memory_gb``                   memory in use on the fullest host
    ``zero/grad_norm/<layer>``                norm of each layer's gradients, before clipping, on request
    ========================================  =====================================================================

    In updates that are not logged it counts samples, and asks neither the device nor other processes for anything.

    Args:
        layer_norms: Log the norm of each layer, too. A layer is a member of a list of modules, such as
            ``net.model.layers.0``, or a module outside of one. Each process looks at the part that it holds, and one
            all-reduce adds them up. Not in manual optimization.
        tokens_per_sample: Tokens in a sample. ``None``: the elements of ``input_ids``, or of a batch that is one matrix
            of whole numbers.
    """

    def __init__(self, layer_norms: bool = False, tokens_per_sample: int | None = None) -> None:
        self.layer_norms = layer_norms
        self.tokens_per_sample = tokens_per_sample
        self._layers: dict[str, list[Parameter]] = {}
        self._norms: dict[str, float] = {}
        self._updated = False
        self._samples = self._tokens = 0.0
        self._since = self._paused_at = 0.0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, ZeroStrategy):
            raise ConfigError(
                f"ZeroMonitor reads ZeRO engines, and this run has {type(trainer.strategy).__name__}. "
                "Use Trainer(strategy='zero2') or another ZeRO name."
            )
        if self.layer_norms and not pl_module.automatic_optimization:
            raise ConfigError(
                "ZeroMonitor(layer_norms=True) needs automatic optimization: in manual optimization gradients are "
                "reduced inside the step. Use layer_norms=False."
            )
        zero = trainer.strategy.resolved.config.get("zero_optimization", {})
        if self.layer_norms and zero.get("round_robin_gradients") and trainer.strategy.stage in (1, 2):
            raise ConfigError(
                "zero_optimization.round_robin_gradients: with it, DeepSpeed gives gradients of another parameter than "
                "the one it is asked for. Turn it off, or use ZeroMonitor(layer_norms=False)."
            )
        if not trainer.loggers:
            rank_zero_warn(
                "ZeroMonitor logs through the Trainer's loggers, and there is none. Pass Trainer(logger=...)."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._layers = gradients.layers(pl_module) if self.layer_norms else {}
        self._begin_interval()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._updated = True
        if not logs_this_batch(trainer):
            return
        session = _session(trainer)
        self._norms = {}
        if session.stage == 0 and pl_module.automatic_optimization:
            norm = gradients.norm_of_whole_gradients(pl_module)
            if norm is not None:
                self._norms[_NORM] = norm / (gradients.loss_scale(session.engine) or 1.0)
        if self._layers:
            norms = gradients.layer_norms(session.engine, self._layers)
            self._norms |= {f"grad_norm/{layer}": norm for layer, norm in norms.items()}

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        samples, tokens = self._size(batch)
        self._samples += samples
        self._tokens += tokens
        updated, self._updated = self._updated, False
        if updated and logs_this_batch(trainer):
            values = self._values(_session(trainer), trainer.strategy.root_device)
            named = {f"zero/{name}": value for name, value in values.items()}
            pl_module.log_dict(named, on_step=True, on_epoch=False, batch_size=1)
            self._begin_interval()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._paused_at = time.monotonic()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since += time.monotonic() - self._paused_at

    def _begin_interval(self) -> None:
        self._samples = self._tokens = 0.0
        self._since = time.monotonic()

    def _values(self, session: EngineSession, device: torch.device) -> dict[str, float]:
        engine = session.engine
        values: dict[str, float | None] = {
            _NORM: gradients.norm_of_the_update(engine),
            "loss_scale": gradients.loss_scale(engine),
        }
        values |= {name: norm for name, norm in self._norms.items() if values.get(name) is None}
        if not engine.was_step_applied():  # without an entry, Lightning would log the last one again
            values |= dict.fromkeys((_NORM, *self._norms), math.nan)
        counted = {"samples": self._samples, "tokens": self._tokens}
        ranks = usage.of_all_ranks({**usage.memory(device), **counted}, device)
        seconds = max(time.monotonic() - self._since, 1e-9)
        for name in counted:
            total = sum(ranks.pop(name))
            values[f"{name}_per_second"] = total / seconds if total else None
        values |= {name: max(used) for name, used in ranks.items()}
        known = {name: value for name, value in values.items() if value is not None}
        return {**known, "skipped_updates": float(engine.skipped_steps)}

    def _size(self, batch: Any) -> tuple[int, int]:
        """Samples and tokens in a micro-batch of this process; 0 where they cannot be told."""
        try:
            samples = extract_batch_size(batch)
        except MisconfigurationException:
            return 0, 0
        if self.tokens_per_sample is not None:
            return samples, samples * self.tokens_per_sample
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.is_complex():
            return samples, 0
        return samples, ids.numel()


def _session(trainer: pl.Trainer) -> EngineSession:
    strategy = trainer.strategy
    assert isinstance(strategy, ZeroStrategy)
    return strategy.session
