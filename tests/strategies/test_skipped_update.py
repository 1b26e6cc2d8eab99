"""An update that overflow skips is not an update.

fp16 does not exist on every CPU. DeepSpeed's bf16 with `check_grad_overflow` takes the same path: gradients that are
not finite on some rank skip the update on all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero import ZeroStrategy
from tests.harness import ranks
from tests.models import Regression, Rows, trainer, whole_weights

STAGES = [1, 2, 3]
ALL = (0, 1, 2, 3, 4, 5)


class Batches(IterableDataset[dict[str, Any]]):
    """One rank's batches, by number; the loss of `infinite` ones is infinite on rank 1, and there alone."""

    def __init__(self, numbers: tuple[int, ...], infinite: tuple[int, ...] = ()) -> None:
        self.numbers = numbers
        self.infinite = infinite

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rank = int(os.environ["RANK"])
        data = Rows(4 * len(ALL))
        for number in self.numbers:
            own = slice(4 * number + 2 * rank, 4 * number + 2 * rank + 2)
            factor = torch.tensor(math.inf if number in self.infinite and rank == 1 else 1.0)
            yield {"number": number, "rows": (data.inputs[own], data.targets[own]), "factor": factor}


class Scaled(Regression):
    """Multiplies the loss with the batch's factor."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch["rows"]) * batch["factor"]


class Manual(Scaled):
    """Makes its updates and moves its scheduler itself, as a program that does not look at overflow does."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        self.lr_schedulers().step()


class Progress(Callback):
    """Notes, after each batch, its number, the count of updates and the next learning rate."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((batch["number"], trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"]))


@dataclass
class Run:
    """What a run ends with."""

    seen: list[tuple[int, int, float]]
    updates: int
    weights: dict[str, Tensor]
    optimizer: list[Tensor]
    checkpoints: list[str]


def run(
    module: Regression,
    stage: int,
    source: Batches,
    folder: Path,
    *callbacks: Callback,
    ckpt_path: Path | None = None,
    **flags: Any,
) -> Run:
    progress = Progress()
    checkpoint = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    strategy = ZeroStrategy(
        stage=stage, micro_batch_size=2, config={"bf16": {"enabled": "auto", "check_grad_overflow": True}}
    )
    every = [progress, checkpoint, *callbacks]
    runner = trainer(strategy, callbacks=every, enable_checkpointing=True, precision="bf16-mixed", **flags)
    runner.fit(module, DataLoader(source, batch_size=None), ckpt_path=ckpt_path)
    from deepspeed.utils import safe_get_full_fp32_param  # not before the strategy has chosen its accelerator

    optimizer = runner.strategy.optimizers[0]
    masters = [safe_get_full_fp32_param(parameter).clone() for parameter in module.parameters()]
    moments = [torch.as_tensor(v) for shard in optimizer.state.values() for _, v in sorted(shard.items())]
    assert len(moments) >= 3, "AdamW counts its steps and keeps two moments"
    files = sorted(path.name for path in folder.iterdir())
    return Run(progress.seen, runner.global_step, whole_weights(module), masters + moments, files)


def assert_equal(actual: Run, expected: Run) -> None:
    assert actual.updates == expected.updates
    for name, weight in expected.weights.items():
        assert torch.equal(actual.weights[name], weight), name
    assert len(actual.optimizer) == len(expected.optimizer)
    for one, other in zip(actual.optimizer, expected.optimizer, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulate", [1, 2])
@ranks(2)
def test_a_skipped_update_leaves_no_trace(stage: int, accumulate: int, tmp_path: Path) -> None:
    """A6: after an infinite loss on one rank all is as if the loader had left out that window, in both epochs."""
    left_out = (3,) if accumulate == 1 else (2, 3)
    rest = tuple(number for number in ALL if number not in left_out)
    flags = {"accumulate_grad_batches": accumulate}
    expected = run(Scaled("adamw"), stage, Batches(rest), tmp_path / "expected", **flags)
    actual = run(Scaled("adamw"), stage, Batches(ALL, infinite=(3,)), tmp_path / "actual", **flags)
    assert expected.updates == 2 * len(rest) // accumulate
    assert_equal(actual, expected)
    assert actual.checkpoints == expected.checkpoints
    assert [entry for entry in actual.seen if entry[0] not in left_out] == expected.seen
    for before, skipped in zip(actual.seen, actual.seen[1:], strict=False):
        if skipped[0] in left_out:
            assert skipped[1:] == before[1:]


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_a_skipped_update_in_manual_optimization(stage: int, tmp_path: Path) -> None:
    """A6: a program that steps its own optimizer and scheduler does not advance on an infinite loss either."""
    expected = run(Manual("adamw"), stage, Batches((0, 1, 2, 4, 5)), tmp_path / "expected")
    actual = run(Manual("adamw"), stage, Batches(ALL, infinite=(3,)), tmp_path / "actual")
    assert expected.updates == 10
    assert_equal(actual, expected)
    assert actual.checkpoints == expected.checkpoints
    assert [entry for entry in actual.seen if entry[0] != 3] == expected.seen


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_resume_after_a_skipped_update(stage: int, tmp_path: Path) -> None:
    """A6: a checkpoint whose last update was skipped resumes with a scheduler that steps."""
    source = Batches((0, 1, 2, 4, 5, 3), infinite=(3,))  # the skipped one ends each epoch
    saves = ModelCheckpoint(tmp_path, filename="saved", save_on_train_epoch_end=True)
    first = run(Scaled("adamw"), stage, source, tmp_path / "first", saves, epochs=1)
    again = run(Scaled("adamw"), stage, source, tmp_path / "again", ckpt_path=tmp_path / "saved.ckpt")
    expected = run(Scaled("adamw"), stage, Batches((0, 1, 2, 4, 5)), tmp_path / "expected")
    assert first.updates == 5
    assert [updates for _, updates, _ in again.seen] == [6, 7, 8, 9, 10, 10]
    assert [lr for *_, lr in again.seen] == pytest.approx([0.02 * 0.9**n for n in (6, 7, 8, 9, 10, 10)])
    assert_equal(again, expected)
