"""The Trainer's strategy: Lightning's questions, answered by the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from os import PathLike
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero._compat import lightning as _lightning
from lightning_zero.config.explain import explain
from lightning_zero.config.resolve import ResolvedConfig
from lightning_zero.config.sources import compose
from lightning_zero.engine import initialize
from lightning_zero.engine.accelerator import check_precision, select_accelerator
from lightning_zero.engine.casting import EvaluationCast
from lightning_zero.engine.session import EngineSession
from lightning_zero.errors import ConfigError
from lightning_zero.strategies import checks, preemption
from lightning_zero.strategies.checkpointed import CheckpointedStrategy
from lightning_zero.strategies.precision import ZeroPrecision
from lightning_zero.strategies.run_config import RunConfig
from lightning_zero.strategies.skipping import SkippedUpdate
from lightning_zero.strategies.starting import (
    built_sharded,
    make_whole,
    settle_parameters,
    start_evaluation,
    start_training,
)


class ZeroStrategy(CheckpointedStrategy):
    """Trains with DeepSpeed ZeRO, on CPU (gloo) and on CUDA.

    Args:
        stage: ZeRO stage: 0 shards nothing, 1 optimizer states, 2 gradients too, 3 parameters too. ``None``: what
            ``config`` or ``preset`` says, else 2.
        offload_optimizer: Where optimizer states live instead of the device: ``"cpu"`` or ``"nvme"``.
        offload_param: Where parameters live outside the layer that uses them: ``"cpu"`` or ``"nvme"``; stage 3 only.
        nvme_path: A folder on the NVMe drive. ``None``: the variable ``LIGHTNING_ZERO_NVME_PATH``.
        config: A DeepSpeed config: a mapping, a JSON or YAML file, or an Accelerate YAML. ``"auto"`` values are filled
            from the Trainer's flags. Never edited.
        preset: A registered strategy name, which ``config`` and ``overrides`` are merged over.
        overrides: Values by dotted key, applied last: ``{"zero_optimization.reduce_bucket_size": 5e7}``.
        auto: Values by dotted key for ``"auto"`` keys that nothing else can supply.
        micro_batch_size: Samples in one process's micro-batch, when the loader does not tell.
        elastic: Whether ``fit`` goes on from checkpoints of another stage or number of processes, too.
        exclude_frozen_parameters: Leave frozen parameters out of checkpoints.
        cast_batch: Turn the floating-point tensors of a batch into the weights' type. Without it, a target in fp32
            stays exact, and the steps cast what the model gets.
        logging_level: Level of DeepSpeed's own log.
        accelerator: As in Lightning.
        parallel_devices: As in Lightning.
        cluster_environment: As in Lightning.
        precision_plugin: As in Lightning.
        process_group_backend: As in Lightning: ``gloo`` on CPU and ``nccl`` on CUDA by default.
        timeout: Longest wait of a collective.

    Raises:
        ConfigError: An argument or a value of the config is wrong, or two of them disagree.
    """

    strategy_name = "zero"

    def __init__(
        self,
        stage: Literal[0, 1, 2, 3] | None = None,
        offload_optimizer: Literal["cpu", "nvme"] | None = None,
        offload_param: Literal["cpu", "nvme"] | None = None,
        nvme_path: str | PathLike[str] | None = None,
        config: Mapping[str, Any] | str | PathLike[str] | None = None,
        *,
        preset: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        auto: Mapping[str, Any] | None = None,
        micro_batch_size: int | None = None,
        elastic: bool = True,
        exclude_frozen_parameters: bool = False,
        cast_batch: bool = True,
        logging_level: int = logging.WARNING,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = _lightning.default_timeout,
    ) -> None:
        self._cast_batch = cast_batch  # read when the base class sets the precision plugin
        # DeepSpeedStrategy.__init__ imports deepspeed before the accelerator is known, and would make a config of
        # its own; its base class has everything else that is needed.
        super(DeepSpeedStrategy, self).__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        sources = compose(
            config,
            preset=preset,
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_param=offload_param,
            nvme_path=nvme_path,
            overrides=overrides,
        )
        self._run_config = RunConfig(sources, auto=auto, micro_batch_size=micro_batch_size)
        self._logging_level = logging_level
        self.elastic = elastic
        self.exclude_frozen_parameters = exclude_frozen_parameters
        self.load_full_weights = False  # read by the parent's load methods
        self._session: EngineSession | None = None
        self._skipped = SkippedUpdate()
        self._cast: EvaluationCast | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(stage={self.stage}) for lightning.pytorch.Trainer"

    # What the user asks

    @property
    def stage(self) -> int:
        """ZeRO stage of this strategy."""
        return self._run_config.stage

    @property
    def resolved(self) -> ResolvedConfig:
        """The config that DeepSpeed gets, and where each value came from.

        Raises:
            ConfigError: No run has started yet, so that nothing could be resolved.
        """
        return self._run_config.resolved

    @property
    def run_config(self) -> RunConfig:
        """What the user said, and what the current run makes of it."""
        return self._run_config

    @property
    def session(self) -> EngineSession:
        """The engine that trains, and what is known of it; for this package's callbacks."""
        return self._running

    def explain(self) -> str:
        """A table of the resolved config: key, value, origin."""
        return explain(self.resolved)

    def release(self) -> None:
        """Frees the engine and its memory.

        Parameters that were whole before the run are whole again; those built in ``configure_model`` at stage 3 stay
        sharded. Collective.
        """
        if self._session is None:
            return
        self._session.release()
        self._session = None
        self._precision.window = None
        self.model = self.lightning_module
        _lightning.release_optimizers(self)

    # Lightning's life cycle of a run

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        if self._session is not None and self._session.ended:  # by another strategy that took the module
            self._session = None
        if self._session is not None and self._session.module is model:
            self.model = self._session.engine

    @override
    def setup_environment(self) -> None:
        trainer = self._trainer
        select_accelerator(self.root_device.type, processes=self.num_processes)
        initialize.set_log_level(self._logging_level)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self._session is not None and (fitting or self._session.module is not self.lightning_module):
            self.release()
        if self._session is None:
            self._run_config.resolve_early(trainer)
            check_precision(self.resolved.config)
            self.config = self.resolved.config  # the parents and some of Lightning's callbacks read it
        super(DeepSpeedStrategy, self).setup_environment()

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        with built_sharded(self.resolved.config, local_rank=self.local_rank):
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._setup_training(trainer)
        elif self._session is None:
            self._setup_evaluation()
        self.barrier("setup")

    @override
    def teardown(self) -> None:
        # The base class moves the module and the optimizer to the CPU, which leaves ZeRO's flat buffers behind.
        if self._session is not None and self._session.evaluate:
            self.release()
        if self._cast is not None:
            self._cast.undo()
            self._cast = None
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # Training

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        """False: Lightning's loop decides which micro-batch ends a window, and the engine follows."""
        return False

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        assert self._session is not None
        with self._session.window.inside():
            yield

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        if output is None and self.lightning_module.automatic_optimization:
            raise ConfigError(
                f"{type(self.lightning_module).__name__}.training_step returned None, and a rank that skips a "
                "backward pass leaves the others waiting. Return a loss of zero: `(output * 0).sum()`."
            )
        return output

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if not self._precision.step_applied:
            self._skipped.discount(self._trainer, self.lr_scheduler_configs)
        return result

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._skipped.forget()
        self._restore_random_numbers()

    @override
    def on_train_start(self) -> None:
        self._run_config.begin_training(self._trainer)
        checks.equal_batches(self._trainer)
        self._restore_random_numbers()

    @override
    def on_train_end(self) -> None:
        self._skipped.forget()

    # Evaluation without an engine (stages 0-2): the weights are cast once they have been loaded

    @override
    def on_validation_start(self) -> None:
        self._cast_for_evaluation()

    @override
    def on_test_start(self) -> None:
        self._cast_for_evaluation()

    @override
    def on_predict_start(self) -> None:
        self._cast_for_evaluation()

    def _cast_for_evaluation(self) -> None:
        if self._cast is not None:
            self._cast.apply(self.root_device, self._precision.weights_dtype)

    # Properties that Lightning sets or asks

    @property
    @override
    def zero_stage_3(self) -> bool:
        return self.stage == 3

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # The Trainer makes Lightning's plugin, which divides the loss a second time and does not clip.
        if isinstance(precision_plugin, _lightning.DeepSpeedPrecision) and not isinstance(
            precision_plugin, ZeroPrecision
        ):
            precision_plugin = ZeroPrecision(precision_plugin.precision, cast_batch=self._cast_batch)
        self._precision_plugin = precision_plugin

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: the names are registered by ``import lightning_zero``."""

    # Details

    @property
    def _precision(self) -> ZeroPrecision:
        assert isinstance(self.precision_plugin, ZeroPrecision)
        return self.precision_plugin

    def _setup_training(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        settle_parameters(
            module, self.resolved.config, remedy="Build the model in `configure_model` instead of `__init__`."
        )
        preemption.watch(trainer)
        self.precision_plugin.convert_module(module)
        if self._layer_sync is not None:
            self._layer_sync.apply(module)
        optimizer, schedulers = self._build_optimizer(module)
        self._run_config.resolve_final(trainer, optimizer=optimizer, scheduler_from_code=bool(schedulers))
        self.config = self.resolved.config
        # With the flag set, the loop calls `clip_gradients` for every update, or a user's hook decides not to.
        clipping = 0.0 if trainer.gradient_clip_val is not None else float(self.resolved.config["gradient_clipping"])
        self._session = start_training(
            module,
            self.resolved.config,
            device=self.root_device,
            local_rank=self.local_rank,
            optimizer=optimizer,
            clipping=clipping,
        )
        self.model = self._session.engine
        self._precision.window = self._session.window
        self.optimizers = [self._session.optimizer]
        scheduler = self._session.scheduler
        self.lr_scheduler_configs = schedulers if scheduler is None else [LRSchedulerConfig(scheduler, interval="step")]
        self.setup_precision_plugin()

    def _build_optimizer(self, module: pl.LightningModule) -> tuple[Optimizer | None, list[LRSchedulerConfig]]:
        if self._run_config.has_optimizer_section:
            checks.no_optimizer_from_code(module)
            return None, []
        optimizers, schedulers = checks.optimizers_from_code(module)
        return optimizers[0], schedulers

    def _setup_evaluation(self) -> None:
        module = self.lightning_module
        assert module is not None
        if not self.zero_stage_3:
            make_whole(module)
        self.precision_plugin.convert_module(module)
        if not self.zero_stage_3:
            self._cast = EvaluationCast(module)
            return
        self._session = start_evaluation(
            module, self.resolved.config, device=self.root_device, local_rank=self.local_rank
        )
        self.model = self._session.engine
