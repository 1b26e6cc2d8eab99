"""The best checkpoint is back in the model when training ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_zero import BestModelCheckpoint, ConfigError
from tests.harness import ranks
from tests.models import Regression, largest_difference, loader, trainer, whole_weights
from tests.strategies.test_checkpoints import masters


class Rigged(Regression):
    """Logs chosen scores, whatever the weights are."""

    scores = (3.0, 1.0, 2.0, 4.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.scores[self.current_epoch], sync_dist=True)
        self.log("reversed", -self.scores[self.current_epoch], sync_dist=True)


class Recorder(Callback):
    """Remembers masters and moments at the end of each epoch."""

    def __init__(self) -> None:
        self.masters: list[dict[str, Tensor]] = []
        self.moments: list[list[Tensor]] = []

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.masters.append(masters(module))
        self.moments.append(moments(trainer))


def moments(trainer: L.Trainer) -> list[Tensor]:
    states = trainer.strategy.model.basic_optimizer.state.values()
    return [value.clone() for state in states for value in state.values() if isinstance(value, Tensor)]


@pytest.mark.parametrize("preset", ["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@ranks(2)
def test_best_of_four_is_back(preset: str, precision: str, tmp_path: Path) -> None:
    """C13: with the best epoch rigged to be 2 of 4, masters and moments at the end are epoch 2's, bit for bit."""
    module, recorder = Rigged("adamw"), Recorder()
    best = BestModelCheckpoint(tmp_path, monitor="score")
    runner = trainer(preset, epochs=4, precision=precision, callbacks=[recorder, best], enable_checkpointing=True)
    runner.fit(module, loader(), loader())
    assert best.best_model_path.endswith("epoch=1-step=12.ckpt")
    assert best.best_model_score == 1.0
    assert largest_difference(masters(module), recorder.masters[1]) == 0
    assert largest_difference(masters(module), recorder.masters[3]) > 0
    assert all(torch.equal(now, then) for now, then in zip(moments(runner), recorder.moments[1], strict=True))
    assert [entry.name for entry in tmp_path.iterdir()] == ["epoch=1-step=12.ckpt"]


@pytest.mark.parametrize("preset", ["zero2", "zero3"])
@ranks(2)
def test_weights_alone(preset: str, tmp_path: Path) -> None:
    """``"weights"`` with ``save_only_model`` keeps single files and brings the best weights back."""
    module, recorder = Rigged("adamw"), Recorder()
    best = BestModelCheckpoint(tmp_path, monitor="score", load_best_model_at_end="weights", save_only_model=True)
    runner = trainer(preset, epochs=4, callbacks=[recorder, best], enable_checkpointing=True)
    runner.fit(module, loader(), loader())
    assert Path(best.best_model_path).is_file()
    assert largest_difference(masters(module), recorder.masters[1]) == 0


@ranks(2)
def test_several_monitors_and_resume(tmp_path: Path) -> None:
    """Two callbacks track two metrics; the one that loads wins, and a resumed run keeps the best score so far."""
    first = BestModelCheckpoint(tmp_path / "low", monitor="score", save_last=True, save_top_k=2)
    second = BestModelCheckpoint(tmp_path / "high", monitor="reversed", load_best_model_at_end=False)
    module = Rigged("adamw")
    runner = trainer("zero3", epochs=2, callbacks=[first, second], enable_checkpointing=True)
    runner.fit(module, loader(), loader())
    assert first.best_model_score == 1.0
    assert second.best_model_score == -3.0
    assert len(list((tmp_path / "low").iterdir())) == 3

    again = BestModelCheckpoint(tmp_path / "low", monitor="score", save_last=True, save_top_k=2)
    resumed, recorder = Rigged("adamw"), Recorder()
    runner = trainer("zero3", epochs=4, callbacks=[again, recorder], enable_checkpointing=True)
    runner.fit(resumed, loader(), loader(), ckpt_path=tmp_path / "low" / "last.ckpt")
    assert again.best_model_score == 1.0
    assert again.best_model_path.endswith("epoch=1-step=12.ckpt")
    assert largest_difference(whole_weights(resumed), whole_weights(module)) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "monitor"),
        ({"monitor": "x", "save_only_model": True}, "save_only_model.*'weights'"),
        ({"monitor": "x", "save_weights_only": True}, "save_weights_only.*'weights'"),
        ({"monitor": "x", "load_best_model_at_end": "model"}, "'model' is not known"),
    ],
)
def test_refused_when_it_is_made(arguments: dict[str, Any], message: str) -> None:
    """Without a metric, or with no optimizer states to restore, the callback is refused at construction."""
    with pytest.raises(ConfigError, match=message):
        BestModelCheckpoint(**arguments)


@ranks(1)
def test_other_strategies_are_refused(tmp_path: Path) -> None:
    """Beside a strategy that has no ZeRO engine, the callback names the strategy to use."""
    best = BestModelCheckpoint(tmp_path, monitor="score")
    with pytest.raises(ConfigError, match="zero2"):
        trainer("ddp", devices=1, callbacks=[best], enable_checkpointing=True).fit(Regression(), loader(ranks=1))
