"""The config of a Trainer's runs: the user's words, resolved afresh in two passes for each run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_zero._compat.lightning import remake_loaders
from lightning_zero.config.decisions import TOTAL_STEPS, WARMUP_STEPS
from lightning_zero.config.dotted import MISSING, get
from lightning_zero.config.explain import explain
from lightning_zero.config.facts import RunFacts
from lightning_zero.config.foresee import Foreseen, foresee
from lightning_zero.config.resolve import ResolvedConfig, resolve_config
from lightning_zero.config.sources import SourcedConfig
from lightning_zero.engine import ops
from lightning_zero.engine.accumulation import caller_owned
from lightning_zero.errors import ConfigError
from lightning_zero.strategies import checks
from lightning_zero.strategies.run_facts import early_facts, final_facts
from lightning_zero.strategies.run_record import write_record

if TYPE_CHECKING:
    import lightning.pytorch as pl


class RunConfig:
    """What the user said, and what the current run makes of it.

    Args:
        sources: Config, preset, arguments and overrides, composed.
        auto: Values by dotted key for ``"auto"`` keys that nothing else can supply.
        micro_batch_size: Samples in one process's micro-batch, when the loader does not tell.
    """

    def __init__(self, sources: SourcedConfig, *, auto: Mapping[str, Any] | None, micro_batch_size: int | None) -> None:
        self._sources = sources
        self._auto = dict(auto or {})
        self._micro_batch_size = checks.micro_batch_size(micro_batch_size)
        self._facts: RunFacts | None = None
        self._resolved: ResolvedConfig | None = None
        self._loaders_made_early = False

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return int(self._sources.values["zero_optimization"]["stage"])

    @property
    def has_optimizer_section(self) -> bool:
        """Whether the config, not code, describes the optimizer."""
        return "optimizer" in self._sources.values

    @property
    def resolved(self) -> ResolvedConfig:
        """The config of the current run, as far as it is resolved."""
        if self._resolved is None:
            raise ConfigError(
                "The config is resolved when a run starts. Call `trainer.fit`, `validate`, `test` or `predict` first."
            )
        return self._resolved

    def foresee(self, trainer: pl.Trainer) -> Foreseen:
        """The config of a fit that has not started, as far as it is known.

        Raises:
            ConfigError: A contradiction.
        """
        return foresee(self._sources, early_facts(trainer, micro_batch_size=self._micro_batch_size, auto=self._auto))

    def resolve_early(self, trainer: pl.Trainer) -> None:
        """Resolves what is known before the model is built; an evaluation needs no more.

        Raises:
            ConfigError: A contradiction, a callback that ZeRO cannot serve, or an op that cannot be had here.
        """
        facts = self._facts = early_facts(trainer, micro_batch_size=self._micro_batch_size, auto=self._auto)
        resolved = resolve_config(self._sources, facts, final=facts.purpose == "evaluate")
        if facts.purpose == "fit":
            checks.callbacks(trainer)
            checks.checkpoint_writer(resolved.config)
        ops.refuse_missing(resolved.config, trainer.strategy.root_device.type)
        self._take(resolved)

    def resolve_final(self, trainer: pl.Trainer, *, optimizer: Optimizer | None, scheduler_from_code: bool) -> None:
        """Resolves the rest, when model and optimizer exist.

        Args:
            trainer: The Trainer, fitting.
            optimizer: The optimizer from code, if there is one.
            scheduler_from_code: Whether code gave a learning-rate scheduler.

        Raises:
            ConfigError: A contradiction, or an ``"auto"`` that nothing can fill.
        """
        assert self._facts is not None
        facts = final_facts(
            self._facts,
            trainer,
            optimizer=optimizer,
            scheduler_from_code=scheduler_from_code,
            needs_total_steps=self._asks_for_total_steps(self._facts),
        )
        self._loaders_made_early = trainer.train_dataloader is not None
        resolved = resolve_config(self._sources, facts)
        if not trainer.lightning_module.automatic_optimization:
            resolved = stepped_by_the_loop(resolved)
        self._take(resolved)
        tell(self.resolved)

    def begin_training(self, trainer: pl.Trainer) -> None:
        """Puts the loaders of a resumed run where they stopped, and writes the config beside the run's logs.

        Args:
            trainer: The Trainer, before the first batch of a fit. Collective.
        """
        remake_loaders(trainer, made_early=self._loaders_made_early)
        write_record(self.resolved, trainer)

    def _asks_for_total_steps(self, facts: RunFacts) -> bool:
        """Whether the config says anything that the number of updates decides."""
        if get(self._sources.values, TOTAL_STEPS) is not MISSING:
            return True
        warmup = facts.warmup_steps
        share = self._auto.get(WARMUP_STEPS, None if warmup is None else warmup.value)
        return get(self._sources.values, WARMUP_STEPS) is not MISSING and share is not None and 0 < float(share) < 1

    def _take(self, resolved: ResolvedConfig) -> None:
        assert self._facts is not None
        self._resolved = buildable(resolved, self._facts)


def buildable(resolved: ResolvedConfig, facts: RunFacts) -> ResolvedConfig:
    """A config without what DeepSpeed cannot compile here, where it can do without."""
    return replace(resolved, config=ops.without_missing(resolved.config, facts.accelerator or "cpu"))


def stepped_by_the_loop(resolved: ResolvedConfig) -> ResolvedConfig:
    """The config for a loop that decides itself when to step: manual optimization, and Fabric's."""
    config = caller_owned(resolved.config)
    before = resolved.config.get("zero_optimization", {})
    origins = {"managed_gradient_accumulation": "the training loop decides when to step"}
    if config.get("zero_optimization", {}).get("overlap_comm") != before.get("overlap_comm"):
        origins["zero_optimization.overlap_comm"] = "off, as it needs to know below stage 2 when a step follows"
    return replace(resolved, config=config, origins={**resolved.origins, **origins})


def tell(resolved: ResolvedConfig) -> None:
    """Shows the remarks on a config as warnings, and the config as a table."""
    for note in resolved.notes:
        rank_zero_warn(note)
    rank_zero_info(explain(resolved, width=shutil.get_terminal_size((140, 0)).columns))
