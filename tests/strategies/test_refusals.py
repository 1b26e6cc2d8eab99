"""One clear error for each mistake, before training."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateFinder, StochasticWeightAveraging

from lightning_zero import CheckpointError, ConfigError, ZeroStrategy
from tests.harness import ranks
from tests.models import Regression, loader, trainer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": 4}, "stage"),
        ({"stage": 2, "offload_param": "cpu"}, "offload_param"),
        ({"offload_optimizer": "gpu"}, "offload_optimizer"),
        ({"preset": "zero4"}, "zero"),
        ({"stage": 3, "offload_optimizer": "nvme"}, "LIGHTNING_ZERO_NVME_PATH"),
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"micro_batch_size": True}, "micro_batch_size=True"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong argument is refused when the strategy is made, by name."""
    monkeypatch.delenv("LIGHTNING_ZERO_NVME_PATH", raising=False)
    with pytest.raises(ConfigError, match=message):
        ZeroStrategy(**arguments)


@pytest.mark.parametrize("precision", ["64-true", "transformer-engine"])
def test_precision_that_deepspeed_cannot_do(precision: Any) -> None:
    """A precision outside the five is refused when the Trainer is made."""
    with pytest.raises(ValueError, match="precision"):
        trainer("zero2", precision=precision)


@ranks(1)
def test_half_precision_that_the_cpu_cannot_do() -> None:
    """fp16 on a CPU without it is refused before the model is built, with the remedy."""
    module = Regression()
    with pytest.raises(ConfigError, match="bf16-mixed"):
        trainer("zero2", devices=1, precision="16-mixed").fit(module, loader(ranks=1))
    assert module.net is None


@ranks(1)
def test_callbacks_that_zero_cannot_serve() -> None:
    """O7: callbacks that average whole weights or change the accumulation are refused before the model is built."""
    for callback in (StochasticWeightAveraging(1e-2), GradientAccumulationScheduler({1: 2}), LearningRateFinder()):
        module = Regression()
        with pytest.raises(Exception, match=r"(?s)(does not work under ZeRO|not supported|does not support|Deepspeed)"):
            trainer("zero2", devices=1, callbacks=[callback]).fit(module, loader(ranks=1))
        assert module.net is None


@ranks(1)
def test_decoupled_writer() -> None:
    """A writer of checkpoints that goes on after the save is refused before the model is built."""
    module = Regression()
    strategy = ZeroStrategy(config={"checkpoint": {"writer": {"type": "FAST", "decoupled": True}}})
    with pytest.raises(ConfigError, match=r"checkpoint\.writer\.decoupled"):
        trainer(strategy, devices=1).fit(module, loader(ranks=1))
    assert module.net is None


@ranks(1)
def test_overridden_backward() -> None:
    """A module that overrides ``backward`` is told that the engine runs it."""

    class Own(Regression):
        def backward(self, loss: Any) -> None:
            loss.backward()

    with pytest.raises(ConfigError, match="backward is overridden"):
        trainer("zero2", devices=1).fit(Own(), loader(ranks=1))


@ranks(2)
def test_ranks_with_different_numbers_of_batches() -> None:
    """R6: ranks with different numbers of batches are told so before the first one, with the numbers and the limit."""
    module = Regression()
    mine = loader(3 + int(os.environ["RANK"]), ranks=1)
    with pytest.raises(ConfigError, match=r"rank 0: 3, rank 1: 4.*limit_train_batches=3"):
        trainer("zero2", use_distributed_sampler=False).fit(module, mine)
    assert module.losses == []


@ranks(1)
def test_load_weights_before_a_run() -> None:
    """``load_weights`` before a run names the hook to call it in."""
    with pytest.raises(CheckpointError, match="on_fit_start"):
        ZeroStrategy().load_weights("anything")


def _fails(code: str, *, env: dict[str, str] | None = None) -> str:
    script = f"import lightning_zero\nfrom tests.models import Regression, loader, trainer\n{code}"
    done = subprocess.run(  # our own code
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": _root(), "OMP_NUM_THREADS": "1", **(env or {})},
    )
    assert done.returncode != 0, done.stdout
    return done.stderr


def _root() -> str:
    from pathlib import Path

    return str(Path(__file__).parents[2])


def test_deepspeed_is_missing() -> None:
    """Without deepspeed the error names the command that installs it."""
    stderr = _fails(
        "import sys\nsys.modules['deepspeed'] = None\ntrainer('zero2', devices=1).fit(Regression(), loader(ranks=1))"
    )
    assert "pip install deepspeed" in stderr.splitlines()[-1]


def test_deepspeed_was_imported_for_another_accelerator() -> None:
    """An imported deepspeed with another accelerator is named, with the variable to set."""
    stderr = _fails(
        "import deepspeed\ntrainer('zero2', devices=1).fit(Regression(), loader(ranks=1))",
        env={"DS_ACCELERATOR": "cuda"},
    )
    assert "DS_ACCELERATOR=cpu" in stderr.splitlines()[-1]


@pytest.mark.parametrize("order", ["lightning_zero, pytorch_lightning", "pytorch_lightning, lightning_zero"])
def test_pytorch_lightning_trainer_is_refused(order: str) -> None:
    """A Trainer of the other package is refused with the import to use, whichever was imported first."""
    stderr = _fails(f"import {order}\npytorch_lightning.Trainer(strategy='zero2', accelerator='cpu', devices=2)")
    assert "`import lightning as L`" in stderr.splitlines()[-1]


@pytest.mark.parametrize("order", ["lightning_zero, lightning_fabric", "lightning_fabric, lightning_zero"])
def test_lightning_fabric_is_refused(order: str) -> None:
    """A Fabric of the package ``lightning_fabric`` is told which one to use, whichever package comes first."""
    stderr = _fails(f"import {order}\nlightning_fabric.Fabric(strategy='zero2', accelerator='cpu', devices=2)")
    assert "Use `import lightning as L` and `L.Fabric`" in stderr


def test_pytorch_lightning_trainer_refuses_an_instance() -> None:
    """pytorch_lightning's own refusal of an instance shows for which Trainer the instance is."""
    stderr = _fails("import pytorch_lightning\npytorch_lightning.Trainer(strategy=lightning_zero.ZeroStrategy())")
    assert "for lightning.pytorch.Trainer" in stderr.splitlines()[-1]


def test_notebook() -> None:
    """In a notebook, several processes are refused with the remedy and one process trains."""
    start = "import lightning_zero._compat.lightning as compat\ncompat.IS_INTERACTIVE = True\n"
    for made in ("trainer('zero2', devices=2)", "L.Fabric(strategy='zero2', accelerator='cpu', devices=2)"):
        stderr = _fails(f"{start}import lightning as L\n{made}")
        assert "devices=1" in stderr.splitlines()[-1]
