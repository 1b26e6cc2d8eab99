"""The strategy and its config in the YAML of LightningCLI."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI

from lightning_zero import ZeroStrategy
from tests.models import Regression

BY_CLASS_PATH = """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  strategy:
    class_path: lightning_zero.ZeroStrategy
    init_args:
      stage: 3
      config:
        train_micro_batch_size_per_gpu: auto
        gradient_clipping: 1.0
        optimizer: {type: AdamW, params: {lr: 1e-5, betas: [0.9, 0.95]}}
        zero_optimization: {reduce_bucket_size: 5e8}
      overrides: {zero_optimization.allgather_bucket_size: 5e7}
      auto: {hidden_size: 8}
"""
EXPECTED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95]}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 500_000_000, "allgather_bucket_size": 50_000_000},
}


def strategy_of(yaml: str, *arguments: str) -> ZeroStrategy:
    """The strategy that LightningCLI makes of a YAML file; nothing is run."""
    Path("run.yaml").write_text(yaml)
    cli = LightningCLI(Regression, run=False, seed_everything_default=False, args=["--config", "run.yaml", *arguments])
    strategy = cli.trainer.strategy
    assert isinstance(strategy, ZeroStrategy)
    return strategy


def said(strategy: ZeroStrategy) -> dict[str, Any]:
    return dict(strategy._run_config._sources.values)


@pytest.fixture(autouse=True)
def _no_arguments_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["program"])


def test_an_inline_mapping_stays_a_mapping() -> None:
    """K12: a mapping under config: in YAML arrives as one, with its numbers read, next to the other arguments."""
    assert said(strategy_of(BY_CLASS_PATH)) == EXPECTED
    short = BY_CLASS_PATH.replace("lightning_zero.ZeroStrategy", "ZeroStrategy")
    assert said(strategy_of(short)) == EXPECTED


def test_a_path_and_a_name() -> None:
    """K12: a config's path, on the command line too, and a registered name."""
    Path("ds.json").write_text('{"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}')
    by_path = (
        "trainer: {accelerator: cpu, devices: 1, logger: false, strategy: {class_path: lightning_zero.ZeroStrategy}}"
    )
    strategy = strategy_of(by_path, "--trainer.strategy.init_args.config=ds.json")
    assert said(strategy) == {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}

    by_name = strategy_of("trainer: {accelerator: cpu, devices: 1, logger: false, strategy: zero3_offload}")
    assert said(by_name) == said(ZeroStrategy(preset="zero3_offload"))
    on_the_line = strategy_of("trainer: {accelerator: cpu, devices: 1, logger: false}", "--trainer.strategy=zero1")
    assert on_the_line.stage == 1


def test_printed_config_gives_the_same_strategy() -> None:
    """K12: what --print_config prints is a YAML that gives the same strategy."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
        strategy_of(BY_CLASS_PATH, "--print_config")
    again = strategy_of(printed.getvalue())
    assert said(again) == EXPECTED
    assert again.stage == 3


def test_a_list_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """K12: a list in the place of the strategy, or of its config, gets an error that shows it."""
    with pytest.raises(SystemExit):
        strategy_of("trainer: {strategy: [{class_path: lightning_zero.ZeroStrategy}]}")
    error = capsys.readouterr().err
    assert "trainer.strategy" in error
    assert "list" in error

    listed = BY_CLASS_PATH.partition("      config:")[0] + "      config: [stage, 3]\n"
    with pytest.raises(Exception, match=r"config: is the text .*Pass a mapping of DeepSpeed's keys") as caught:
        strategy_of(listed)
    assert "is not there" not in str(caught.value)
