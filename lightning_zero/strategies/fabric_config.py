"""The configs of a Fabric's models: the user's words, resolved for each model that is set up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from lightning.fabric.strategies import DeepSpeedStrategy
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zero.config.facts import Fact, RunFacts
from lightning_zero.config.resolve import ResolvedConfig, resolve_config
from lightning_zero.config.sources import SourcedConfig
from lightning_zero.engine import ops
from lightning_zero.errors import ConfigError
from lightning_zero.integrations.transformers import hidden_size
from lightning_zero.strategies import checks
from lightning_zero.strategies.run_config import buildable, stepped_by_the_loop, tell
from lightning_zero.strategies.run_facts import hyper_parameters, optimizer_facts


class FabricConfig:
    """What the user said, and what it means for each model.

    Args:
        sources: Config, preset, arguments and overrides, composed.
        auto: Values by dotted key for ``"auto"`` keys that nothing else can supply.
        micro_batch_size: Samples in one process's micro-batch.
        gradient_clipping: Largest gradient norm of every update; 0 says nothing.
    """

    def __init__(
        self,
        sources: SourcedConfig,
        *,
        auto: Mapping[str, Any] | None,
        micro_batch_size: int | None,
        gradient_clipping: float,
    ) -> None:
        self._sources = sources
        self._auto = dict(auto or {})
        self._micro_batch_size = checks.micro_batch_size(micro_batch_size)
        self._clipping = _largest_norm(gradient_clipping)
        self._facts: RunFacts | None = None
        self._early: ResolvedConfig | None = None

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return int(self._sources.values["zero_optimization"]["stage"])

    @property
    def has_optimizer_section(self) -> bool:
        """Whether the config, not code, describes the optimizer."""
        return "optimizer" in self._sources.values

    @property
    def before_models(self) -> ResolvedConfig:
        """What is known before a model is set up."""
        if self._early is None:
            raise ConfigError("The config is resolved when the processes have been launched. Call `fabric.launch()`.")
        return self._early

    def launch(self, strategy: DeepSpeedStrategy) -> None:
        """Resolves what is known before a model is built.

        Raises:
            ConfigError: A contradiction, or an op that cannot be had here.
        """
        self._facts = self._fabric_facts(strategy)
        resolved = resolve_config(self._sources, self._facts, final=False)
        checks.checkpoint_writer(resolved.config)
        ops.refuse_missing(resolved.config, strategy.root_device.type)
        self._early = buildable(resolved, self._facts)

    def for_training(self, module: Module, optimizer: Optimizer | None, *, scheduler_from_code: bool) -> ResolvedConfig:
        """The config of a model that is trained, shown to the user.

        Args:
            module: The model.
            optimizer: The optimizer from code; ``None``: the config describes it.
            scheduler_from_code: Whether code gave a learning-rate scheduler.

        Raises:
            ConfigError: A contradiction, or an ``"auto"`` that nothing can fill.
        """
        facts = replace(
            self._known,
            **hyper_parameters(module),
            **optimizer_facts(optimizer, "fabric.setup"),
            hidden_size=_hidden_size(module),
            scheduler_from_code=scheduler_from_code,
        )
        resolved = buildable(resolve_config(self._sources, facts), facts)
        tell(resolved)
        return stepped_by_the_loop(resolved)

    def for_evaluation(self, module: Module) -> ResolvedConfig:
        """The config of a model without an optimizer.

        Args:
            module: The model.

        Raises:
            ConfigError: A contradiction.
        """
        facts = replace(self._known, purpose="evaluate", hidden_size=_hidden_size(module))
        return buildable(resolve_config(self._sources, facts), facts)

    @property
    def _known(self) -> RunFacts:
        if self._facts is None:
            raise ConfigError("No process has been launched. Call `fabric.launch()` before `fabric.setup`.")
        return self._facts

    def _fabric_facts(self, strategy: DeepSpeedStrategy) -> RunFacts:
        nodes, devices = strategy.num_nodes, strategy.num_processes
        accelerator: Literal["cpu", "cuda"] = "cpu" if strategy.root_device.type == "cpu" else "cuda"
        precision = str(getattr(strategy.precision, "precision", "32-true"))
        micro, clipping = self._micro_batch_size, self._clipping
        return RunFacts(
            world_size=Fact(nodes * devices, f"Fabric(num_nodes={nodes}, devices={devices})"),
            num_nodes=Fact(nodes, f"Fabric(num_nodes={nodes})"),
            node_rank=Fact(strategy.node_rank, "the cluster environment's node rank"),
            accelerator=accelerator,
            precision=Fact(precision, f"Fabric(precision={precision!r})"),
            micro_batch_size=None if micro is None else Fact(micro, f"micro_batch_size={micro}"),
            loop_accumulates=True,
            gradient_clip_val=Fact(clipping, f"gradient_clipping={clipping:g}") if clipping else None,
            auto=self._auto,
        )


def _hidden_size(module: Module) -> Fact[int] | None:
    size = hidden_size(module)
    return None if size is None else Fact(*size)


def _largest_norm(value: float) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ConfigError(
            f"gradient_clipping={value!r} is not a gradient norm. Pass a number above 0, or 0 to clip nothing."
        )
    return float(value)
