"""Fabric's strategy: the engines of a loop that the user writes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from os import PathLike
from typing import Any, Literal

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import ClusterEnvironment, DeepSpeedPrecision, Precision
from lightning.fabric.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero._compat import lightning as _lightning
from lightning_zero.config.explain import explain
from lightning_zero.config.resolve import ResolvedConfig
from lightning_zero.config.sources import compose
from lightning_zero.engine.accumulation import windows_behind
from lightning_zero.engine.empty_states import refuse_empty_state_dict
from lightning_zero.engine.session import EngineSession, end_session
from lightning_zero.errors import ConfigError
from lightning_zero.integrations.transformers import Zero3Marker
from lightning_zero.strategies import checks, starting
from lightning_zero.strategies.fabric_checkpointed import FabricCheckpointedStrategy
from lightning_zero.strategies.fabric_config import FabricConfig
from lightning_zero.strategies.fabric_models import SetUpModels
from lightning_zero.strategies.fabric_precision import FabricZeroPrecision


class FabricZeroStrategy(FabricCheckpointedStrategy):
    """DeepSpeed ZeRO under :class:`lightning.Fabric`, on CPU (gloo) and on CUDA.

    Args:
        stage: As for :class:`ZeroStrategy`, like every argument without a description.
        offload_optimizer: ``"cpu"`` or ``"nvme"``.
        offload_param: ``"cpu"`` or ``"nvme"``; stage 3 only.
        nvme_path: A folder on the NVMe drive.
        config: A DeepSpeed config. ``"auto"`` values are filled from Fabric's flags and the model.
        preset: A registered strategy name.
        overrides: Values by dotted key, applied last.
        auto: Values by dotted key for ``"auto"`` keys that nothing else can supply.
        micro_batch_size: Samples in one process's micro-batch; DeepSpeed counts with it, and nothing depends on it.
        gradient_clipping: Largest gradient norm of every update; 0 clips nothing, unless the config does. For one
            update, ``fabric.clip_gradients(model, optimizer, max_norm=...)``.
        elastic: Whether ``fabric.load`` takes optimizer states of another stage or number of processes, too.
        exclude_frozen_parameters: Leave frozen parameters out of checkpoints.
        logging_level: Level of DeepSpeed's own log.
        accelerator: As in Lightning.
        parallel_devices: As in Lightning.
        cluster_environment: As in Lightning.
        precision: As in Lightning.
        process_group_backend: As in Lightning.
        timeout: Longest wait of a collective.

    Raises:
        ConfigError: An argument or a value of the config is wrong, or two of them disagree.
    """

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
        gradient_clipping: float = 0.0,
        elastic: bool = True,
        exclude_frozen_parameters: bool = False,
        logging_level: int = logging.WARNING,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = _lightning.default_timeout,
    ) -> None:
        # Past the parent's __init__, for the same reasons as in the Trainer's strategy.
        super(DeepSpeedStrategy, self).__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision=precision,
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
        self._fabric_config = FabricConfig(
            sources, auto=auto, micro_batch_size=micro_batch_size, gradient_clipping=gradient_clipping
        )
        self._models = SetUpModels()
        self._logging_level = logging_level
        self._marker: Zero3Marker | None = None
        self._backward_sync_control = _AccumulationControl()  # type: ignore[assignment]  # of a private class
        self.elastic = elastic
        self.exclude_frozen_parameters = exclude_frozen_parameters

    def __repr__(self) -> str:
        return f"{type(self).__name__}(stage={self.stage}) for lightning.Fabric"

    # What the user asks

    @property
    def stage(self) -> int:
        """ZeRO stage of this strategy."""
        return self._fabric_config.stage

    @property
    def resolved(self) -> ResolvedConfig:
        """The config of the model that was set up last; before the first one, as far as it is known.

        Raises:
            ConfigError: ``fabric.launch`` has not been called, so that nothing could be resolved.
        """
        return self._models.last_resolved or self._fabric_config.before_models

    def explain(self, model: Module | None = None) -> str:
        """A table of a resolved config: key, value, origin.

        Args:
            model: What ``fabric.setup`` returned; ``None``: the model that was set up last.
        """
        if model is None:
            return explain(self.resolved)
        return explain(self._models.resolved(self._models.meant(model, "fabric.strategy.explain({})")))

    def optimizer_and_scheduler(self, model: Module | None = None) -> tuple[Optimizer, Any]:
        """The optimizer and the learning-rate scheduler that the config describes, for ``fabric.setup(model)``.

        Step them as any others: ``optimizer.step()`` once an update, then ``scheduler.step()``.

        Args:
            model: What ``fabric.setup`` returned; needed when several models are trained.

        Returns:
            The optimizer, and the scheduler or ``None``.

        Raises:
            ConfigError: No such model is trained.
        """
        session = self._models.training(model, "fabric.strategy.optimizer_and_scheduler({})")
        return session.optimizer, session.scheduler

    @contextmanager
    def generation_context(self) -> Iterator[None]:
        """A context in which ``generate`` of a sharded transformers model keeps ranks in step that stop apart.

        Without effect below stage 3.
        """
        if not self.zero_stage_3:
            yield
            return
        if self._marker is None:
            self._marker = Zero3Marker(self.resolved.config)
        with self._marker.shown():
            yield

    def release(self, model: Module | None = None) -> None:
        """Frees engines and their memory. Collective.

        Args:
            model: What ``fabric.setup`` returned; ``None``: all.
        """
        chosen = self._models.all if model is None else [self._models.meant(model, "fabric.strategy.release({})")]
        for module in chosen:
            end_session(module)
            self._models.forget(module)

    # Models

    @contextmanager
    @override
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with super(DeepSpeedStrategy, self).module_init_context(empty_init=empty_init), self.module_sharded_context():
            yield

    @override
    def module_sharded_context(self) -> AbstractContextManager[None]:
        return starting.built_sharded(self._fabric_config.before_models.config, local_rank=self.local_rank)

    @override
    def setup_module_and_optimizers(
        self, module: Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[Any, list[Optimizer], Any]:
        optimizer = checks.one_optimizer(optimizers, module)
        session = self._start_training(module, optimizer, scheduler_from_code=scheduler is not None)
        return session.engine, [session.optimizer], scheduler

    @override
    def setup_module(self, module: Module) -> Any:
        """Sets a model up for inference; for training, when the config describes the optimizer."""
        if self._fabric_config.has_optimizer_section and any(p.requires_grad for p in module.parameters()):
            return self._start_training(module, None, scheduler_from_code=False).engine
        resolved = self._fabric_config.for_evaluation(module)
        self._models.add(module, resolved)
        if self.zero_stage_3:
            self._start(starting.start_evaluation, module, resolved)
        else:
            starting.settle_for_evaluation(module, resolved.config)
        return module  # the engine's hooks are in it; its outputs would refuse the gradients of a model in front of it

    # Training

    @property
    @override
    def model(self) -> Any:
        """``None``: Fabric's optimizers would step this model, whichever is theirs."""
        return None

    @override
    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        own = self._models.training(module, "fabric.backward(loss, model={})")
        checks.loss(tensor, args, kwargs)
        others = [session.window for session in self._models.trained if session is not own]
        behind = windows_behind(tensor) if others else []
        if behind and own.window not in behind:
            raise ConfigError(
                f"fabric.backward(loss, model=...): the loss does not depend on {type(own.module).__name__}, which "
                "model= names, but on another model. Pass the model whose output it is made from."
            )
        with ExitStack() as passed:
            for window in others:
                passed.enter_context(window.passed_through())
            super().backward(tensor, own.window, *args, **kwargs)  # type: ignore[arg-type]  # what the plugin asks of it

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clips at the next ``optimizer.step()``, which fills in the norm that is returned; it is NaN before.

        Raises:
            ConfigError: Another norm than the 2-norm.
        """
        if float(norm_type) != 2.0:
            raise ConfigError(
                f"norm_type={norm_type!r} cannot be computed on sharded gradients. Use norm_type=2.0, the default."
            )
        session = self._models.find_optimizer(optimizer) or self._models.training(module, "clip_gradients({}, ...)")
        return session.window.clip_and_measure(float(max_norm), must_be_finite=error_if_nonfinite)

    @override
    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float) -> None:
        raise ConfigError(
            f"clip_val={clip_val!r} cannot be done on sharded gradients. Use fabric.clip_gradients(..., max_norm=...)."
        )

    # Properties that Lightning sets or asks, and details

    @property
    @override
    def precision(self) -> Precision:
        return self._precision if self._precision is not None else Precision()

    @precision.setter
    @override
    def precision(self, precision: Precision | None) -> None:
        if type(precision) is DeepSpeedPrecision:  # the one that Fabric makes
            precision = FabricZeroPrecision(precision.precision)  # type: ignore[arg-type]  # the base class widens it
        self._precision = precision

    @property
    @override
    def zero_stage_3(self) -> bool:
        return self.stage == 3

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: the names are registered by ``import lightning_zero``."""

    def _start_training(
        self, module: Module, optimizer: Optimizer | None, *, scheduler_from_code: bool
    ) -> EngineSession:
        resolved = self._fabric_config.for_training(module, optimizer, scheduler_from_code=scheduler_from_code)
        checks.one_swapping_model(
            resolved.config, [other for other in self._models.trained if other.module is not module]
        )
        starting.settle_parameters(
            module, resolved.config, remedy="Build the model inside `with fabric.init_module():`."
        )
        self.precision.convert_module(module)
        clipping = float(resolved.config["gradient_clipping"])
        session = self._start(starting.start_training, module, resolved, optimizer=optimizer, clipping=clipping)
        session.window.watch()
        self._models.add(module, resolved)
        return session

    def _start(
        self, start: Callable[..., EngineSession], module: Module, resolved: ResolvedConfig, **kwargs: Any
    ) -> EngineSession:
        session = start(module, resolved.config, device=self.root_device, local_rank=self.local_rank, **kwargs)
        if self.zero_stage_3:
            refuse_empty_state_dict(
                module,
                "Save it with `fabric.save`, or its whole weights with `fabric.strategy.save_gathered_weights`, on "
                "every rank.",
            )
        return session


class _AccumulationControl:
    """Every backward pass adds to the window, and the step ends it: there is nothing to hold back."""

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        """What ``fabric.no_backward_sync`` calls."""
        return nullcontext()
