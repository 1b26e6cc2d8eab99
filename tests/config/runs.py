"""A run to start from, and what a resolver says about a config in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lightning_zero.config.dotted import MISSING, get
from lightning_zero.config.facts import Fact, RunFacts
from lightning_zero.config.resolve import ResolvedConfig, resolve_config
from lightning_zero.config.sources import SourcedConfig, compose
from lightning_zero.errors import ConfigError

ABSENT = MISSING
"""What :func:`value` gives for a key that is not in the result."""


def facts(**changes: Any) -> RunFacts:
    """Two processes, batches of 8, an update every 4 of them, bf16; each changed or left out (None) by name."""
    known: dict[str, Any] = {
        "world_size": Fact(2, "Trainer(devices=2)"),
        "micro_batch_size": Fact(8, "DataLoader.batch_size"),
        "accumulate_grad_batches": Fact(4, "Trainer(accumulate_grad_batches=4)"),
        "precision": Fact("bf16-mixed", "Trainer(precision='bf16-mixed')"),
        "learning_rate": Fact(1e-4, "module.hparams.lr"),
        "total_steps": Fact(1000, "trainer.estimated_stepping_batches"),
        "optimizer_from_code": False,
        "scheduler_from_code": False,
    }
    return RunFacts(**{**known, **changes})


def said(config: Mapping[str, Any] | SourcedConfig, final: bool = True, **changes: Any) -> list[str]:
    """The lines of the error that a config gets in a run."""
    with pytest.raises(ConfigError) as caught:
        resolve_config(config, facts(**changes), final=final)
    return str(caught.value).splitlines()


def resolved(config: Any = None, final: bool = True, **changes: Any) -> ResolvedConfig:
    """The result for a config in a run."""
    return resolve_config(config if config is not None else compose(environ={}), facts(**changes), final=final)


def value(result: ResolvedConfig, key: str) -> Any:
    """The value at a dotted key, or ``ABSENT``."""
    return get(result.config, key)
