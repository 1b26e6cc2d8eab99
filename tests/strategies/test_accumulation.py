"""Windows that a loop owns, abandons or shares between modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero import ConfigError, ZeroStrategy
from tests.harness import ranks
from tests.models import Regression, Rows, largest_difference, loader, trainer, whole_weights

STAGES = [0, 1, 2, 3]
OFFLOADED = [(stage, offload) for stage in STAGES for offload in (None, "cpu") if stage or offload is None]


class Manual(Regression):
    """Two backwards on halves of the batch, then one step, as manual optimization allows."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("sgd", **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for half in (0, 1):
            rows, targets = batch[0][half : half + 1], batch[1][half : half + 1]
            self.manual_backward(self.loss((rows, targets)))
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()


class Abandoning(Manual):
    """One backward is dropped by ``zero_grad`` before a normal window."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(100 * self.loss(batch))
        super().training_step(batch, batch_idx)


class SkipsRest(Regression):
    """Stops the first epoch in the middle of a window, so that a left-over gradient exists."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 2 else None


def train(strategy: Any, module: Regression, **flags: Any) -> tuple[dict[str, Tensor], int]:
    runner = trainer(strategy, **flags)
    runner.fit(module, loader())
    return whole_weights(module), runner.global_step


@pytest.mark.parametrize(("stage", "offload"), OFFLOADED)
@ranks(2)
def test_manual_optimization_sums_both_backwards(stage: int, offload: Any) -> None:
    """A8, A3: two backwards before one step give the sum, clipped as asked, with and without offload."""
    expected = train("ddp", Manual())
    actual = train(ZeroStrategy(stage=stage, offload_optimizer=offload), Manual())
    assert largest_difference(actual[0], expected[0]) < 1e-6
    assert actual[1] == expected[1] == 12


@pytest.mark.parametrize(("stage", "offload"), OFFLOADED)
@ranks(2)
def test_zero_grad_drops_an_abandoned_backward(stage: int, offload: Any) -> None:
    """A10: a backward that ``zero_grad`` follows leaves nothing in the next update."""
    expected = train("ddp", Manual())
    actual = train(ZeroStrategy(stage=stage, offload_optimizer=offload), Abandoning())
    assert largest_difference(actual[0], expected[0]) < 1e-6


@pytest.mark.parametrize(("stage", "offload"), OFFLOADED)
@ranks(2)
def test_epoch_stopped_inside_a_window(stage: int, offload: Any) -> None:
    """A10: a hook that ends the epoch inside a window drops its gradients, as under ddp."""
    flags = {"accumulate_grad_batches": 4}
    expected = train("ddp", SkipsRest("sgd"), **flags)
    actual = train(ZeroStrategy(stage=stage, offload_optimizer=offload), SkipsRest("sgd"), **flags)
    assert largest_difference(actual[0], expected[0]) < 1e-6
    assert actual[1] == expected[1]


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_module_used_twice_in_fp32(stage: int) -> None:
    """A5: a layer used two times in one forward gets both gradients, also over a window of four."""
    flags = {"accumulate_grad_batches": 4}
    expected = train("ddp", Regression("sgd", twice=True), **flags)
    actual = train(ZeroStrategy(stage=stage), Regression("sgd", twice=True), **flags)
    assert largest_difference(actual[0], expected[0]) < 1e-6


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2)
def test_module_used_twice_in_bf16(stage: int) -> None:
    """A5: in bf16 the stages stay within bf16's rounding of ddp in fp32 from the same weights."""
    expected = train("ddp", Regression("sgd", twice=True))
    actual = train(ZeroStrategy(stage=stage), Regression("sgd", twice=True), precision="bf16-mixed")
    start = whole_weights(Regression("sgd", twice=True, born_sharded=False))
    moved = largest_difference(expected[0], start)
    assert largest_difference(actual[0], expected[0]) < 0.1 * moved


@ranks(2)
def test_bf16_stages_agree() -> None:
    """Stages 1, 2 and 3 in bf16 agree after 24 updates within bf16's rounding of the weights."""
    runs = [
        train(ZeroStrategy(stage=stage), Regression("adamw"), precision="bf16-mixed", epochs=4)[0]
        for stage in (1, 2, 3)
    ]
    largest = max(tensor.abs().max().item() for tensor in runs[0].values())
    for other in runs[1:]:
        assert largest_difference(runs[0], other) <= 4 * torch.finfo(torch.bfloat16).eps * largest


class ClipsItself(Regression):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **_: Any) -> None:
        if self.trainer.global_step % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_overridden_clipping_hook_clips(stage: int) -> None:
    """A3: an overridden ``configure_gradient_clipping`` clips just the updates that it chooses."""
    expected = train("ddp", ClipsItself("sgd"))
    actual = train(ZeroStrategy(stage=stage), ClipsItself("sgd"))
    assert largest_difference(actual[0], expected[0]) < 1e-6


@ranks(1)
def test_clipping_by_value_is_refused() -> None:
    """A3: clipping by value is refused before training."""
    module = Regression()
    with pytest.raises(ConfigError, match=r"gradient_clip_algorithm.*norm"):
        trainer(ZeroStrategy(), devices=1, gradient_clip_val=0.1, gradient_clip_algorithm="value").fit(
            module, loader(ranks=1)
        )
    assert module.net is None


@ranks(2)
def test_one_update_is_as_long_as_one_large_batch() -> None:
    """A2: one SGD update over a window of four equals one over a four times larger batch; losses are unscaled."""
    in_four = Regression("sgd")
    runner = trainer(ZeroStrategy(stage=2), accumulate_grad_batches=4, epochs=1, use_distributed_sampler=False)
    runner.fit(in_four, DataLoader(Rows(8), batch_size=2))
    assert runner.global_step == 1
    at_once = Regression("sgd")
    runner = trainer(ZeroStrategy(stage=2), epochs=1, use_distributed_sampler=False)
    runner.fit(at_once, DataLoader(Rows(8), batch_size=8))
    assert runner.global_step == 1
    assert largest_difference(whole_weights(in_four), whole_weights(at_once)) < 1e-6
    assert sum(in_four.losses) / 4 == pytest.approx(at_once.losses[0], abs=1e-6)
