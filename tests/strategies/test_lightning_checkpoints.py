"""Checkpoints that Lightning's own DeepSpeedStrategy wrote, in the hands of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from tests.data.checkpoints.make import HERE, Remember, Tiny
from tests.harness import ranks
from tests.models import largest_difference, trainer, whole_weights


class Born(Tiny):
    """Evaluates, too."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", self.net(batch).mean(), sync_dist=True)


class AtStart(Callback):
    """Keeps the weights and the counts that a run begins with."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.weights = whole_weights(module)
        self.steps = trainer.global_step
        self.epoch = trainer.current_epoch
        self.moments = [s["exp_avg"].abs().sum().item() for s in trainer.optimizers[0].state.values()]


def data() -> Any:
    torch.manual_seed(3)
    return DataLoader(torch.randn(16, 5), batch_size=2)


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_old_checkpoints_go_on(stage: int) -> None:
    """A folder of Lightning's strategy is evaluated and resumed: weights, moments, counts."""
    old = HERE / f"lightning-stage{stage}.ckpt"
    expected = torch.load(HERE / f"lightning-stage{stage}.expected.pt", weights_only=True)
    weights = {name: value for name, value in expected.items() if name != "seen"}

    module = Born()
    first = trainer(ZeroStrategy(stage=stage))
    first.test(module, data(), ckpt_path=old)
    with torch.no_grad():
        plain = Tiny()
        plain.load_state_dict(expected)
        mean = plain.net(data().dataset).mean().item()
    assert first.callback_metrics["mean"].item() == pytest.approx(mean, rel=1e-5)

    start = AtStart()
    trainer(ZeroStrategy(stage=stage), callbacks=[start, Remember()], max_epochs=2).fit(Born(), data(), ckpt_path=old)
    assert largest_difference(start.weights, weights) == 0
    assert (start.steps, start.epoch) == (4, 1)
    assert all(moment > 0 for moment in start.moments)
