"""Saving, resuming, evaluating: what was saved is what comes back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

from lightning_zero import CheckpointError, ZeroStrategy
from tests.harness import ranks
from tests.models import Regression, body, largest_difference, loader, trainer, whole_weights

STAGES = [0, 1, 2, 3]


def masters(module: nn.Module) -> dict[str, Tensor]:
    """The fp32 weights that the optimizer keeps."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {
        name: safe_get_full_fp32_param(parameter).reshape(getattr(parameter, "ds_shape", parameter.shape)).clone()
        for name, parameter in module.named_parameters()
    }


class Dropping(Regression):
    """Consumes random numbers in every forward."""

    def configure_model(self) -> None:
        if self.net is None:
            inner = body()
            self.net = nn.Sequential(inner[0], inner[1], nn.Dropout(0.3), inner[2])


class SaveAt(Callback):
    """Saves after a chosen batch of the run."""

    def __init__(self, path: Path, batch: int) -> None:
        self.path = path
        self.batch = batch
        self.seen = 0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.seen += 1
        if self.seen == self.batch:
            trainer.save_checkpoint(self.path)


def fitted(module: Regression, strategy: Any, *, ckpt_path: Any = None, **flags: Any) -> L.Trainer:
    L.seed_everything(3 + int(os.environ["RANK"]), verbose=False)
    runner = trainer(strategy, **flags)
    runner.fit(module, loader(), ckpt_path=ckpt_path)
    return runner


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("preset", ["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"])
@ranks(2)
def test_resume_equals_an_uninterrupted_run(preset: str, precision: str, tmp_path: Path) -> None:
    """Saved at an epoch's end and resumed in a fresh engine, masters, LR and counters equal an uninterrupted run's."""
    path = tmp_path / "epoch.ckpt"
    whole = Dropping("adamw")
    flags = {"precision": precision, "accumulate_grad_batches": 2}

    class SaveEpoch(Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

    through = fitted(whole, preset, epochs=3, callbacks=[SaveEpoch()], **flags)
    resumed = Dropping("adamw")
    again = fitted(resumed, preset, epochs=3, ckpt_path=path, **flags)
    assert again.global_step == through.global_step == 9
    assert resumed.lrs == whole.lrs[3:]
    assert resumed.losses == whole.losses[6:]
    expected, actual = masters(whole), masters(resumed)
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_resume_inside_a_window_equals_ddp(stage: int, tmp_path: Path) -> None:
    """Saved after each micro-batch of a window of four and resumed, weights and steps equal what ddp does there."""
    for batch in (1, 2, 3, 4, 5):
        results = []
        for strategy in ("ddp", ZeroStrategy(stage=stage)):
            name = "ddp" if strategy == "ddp" else "zero"
            path = tmp_path / f"{name}-{batch}.ckpt"
            first = Regression("sgd")
            fitted(first, strategy, callbacks=[SaveAt(path, batch)], accumulate_grad_batches=4, epochs=1)
            second = Regression("sgd")
            again = "ddp" if strategy == "ddp" else ZeroStrategy(stage=stage)
            runner = fitted(second, again, ckpt_path=path, accumulate_grad_batches=4, epochs=2)
            results.append((whole_weights(second), runner.global_step, second.lrs))
        assert results[1][1:] == results[0][1:], batch
        assert largest_difference(results[1][0], results[0][0]) < 1e-6, batch


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_evaluation_from_a_folder(stage: int, tmp_path: Path) -> None:
    """C1: test in a fresh strategy from a sharded folder gives the trained model's metric, without an optimizer."""
    path = tmp_path / "run.ckpt"
    module = Regression("adamw")
    runner = fitted(module, ZeroStrategy(stage=stage))
    runner.save_checkpoint(path)
    [expected] = runner.test(module, loader(), verbose=False)
    fresh = Regression("adamw")
    tester = trainer(ZeroStrategy(stage=stage, config={"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}))
    [actual] = tester.test(fresh, loader(), ckpt_path=path, verbose=False)
    assert actual["test_loss"] == pytest.approx(expected["test_loss"], abs=1e-7)
    assert tester.strategy.optimizers == []
    predictions = tester.predict(fresh, loader(), ckpt_path=path)
    assert predictions is not None
    assert largest_difference(whole_weights(fresh), whole_weights(module)) == 0


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_single_files_of_any_origin(stage: int, tmp_path: Path) -> None:
    """C14: a ddp run's file loads at any stage, into masters too, so that a step with lr=0 changes nothing."""
    reference = Regression("sgd")
    ddp = fitted(reference, "ddp")
    ddp.save_checkpoint(tmp_path / "ddp.ckpt")
    expected = whole_weights(reference)

    class Still(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    for precision in ("32-true", "bf16-mixed"):
        module = Still()
        runner = trainer(ZeroStrategy(stage=stage), precision=precision, epochs=3)
        with pytest.warns(UserWarning, match="optimizer starts afresh") if os.environ["RANK"] == "0" else _nothing():
            runner.fit(module, loader(), ckpt_path=tmp_path / "ddp.ckpt")
        assert runner.global_step == 18
        tolerance = 0 if precision == "32-true" else 0.005
        assert largest_difference(whole_weights(module), expected) <= tolerance
        if stage:
            assert largest_difference(masters(module), expected) == 0
    [metrics] = trainer(ZeroStrategy(stage=stage)).test(
        Regression(), loader(), ckpt_path=tmp_path / "ddp.ckpt", verbose=False
    )
    [wanted] = ddp.test(reference, loader(), verbose=False)
    assert metrics["test_loss"] == pytest.approx(wanted["test_loss"], abs=1e-7)


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_weights_only(stage: int, tmp_path: Path) -> None:
    """C3: one file without optimizer state, which evaluation opens; resuming from it says what is missing."""
    path = tmp_path / "weights.ckpt"
    module = Regression("adamw")
    runner = fitted(module, ZeroStrategy(stage=stage), precision="bf16-mixed")
    runner.save_checkpoint(path, weights_only=True)
    assert path.is_file()
    content = torch.load(path, weights_only=True)
    assert "optimizer_states" not in content
    loaded = content["state_dict"]
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}
    if stage:
        assert largest_difference(loaded, masters(module)) == 0
    rounded = {name: tensor.bfloat16().float() for name, tensor in loaded.items()}
    assert largest_difference(rounded, whole_weights(module)) == 0

    restored = Whole.load_from_checkpoint(path, map_location="cpu")
    assert largest_difference(dict(restored.named_parameters()), loaded) == 0  # type: ignore[arg-type]
    [metrics] = trainer(ZeroStrategy(stage=stage)).test(Regression(), loader(), ckpt_path=path, verbose=False)
    [wanted] = trainer("ddp").test(restored, loader(), verbose=False)
    assert metrics["test_loss"] == pytest.approx(wanted["test_loss"], abs=1e-6)
    with pytest.raises(KeyError, match="save_weights_only"):
        fitted(Regression("adamw"), ZeroStrategy(stage=stage), ckpt_path=path)


class Whole(Regression):
    """Whole from the start, so that ``load_from_checkpoint`` can fill it."""

    def __init__(self) -> None:
        super().__init__(born_sharded=False)


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_load_into_a_live_engine(stage: int, tmp_path: Path) -> None:
    """C6, A10: after further steps, loading brings masters and moments back, so that the same steps repeat exactly."""
    path = tmp_path / "run.ckpt"
    module = Regression("adamw")
    runner = fitted(module, ZeroStrategy(stage=stage))
    runner.save_checkpoint(path)
    saved = masters(module)
    after = []
    for _ in range(2):
        runner.strategy.load_checkpoint(path)
        assert largest_difference(masters(module), saved) == 0
        for batch in list(loader(ranks=1))[:2]:
            engine = runner.strategy.model
            loss = nn.functional.mse_loss(engine(batch[0]), batch[1])
            runner.strategy._session.window.backward(loss)
            runner.strategy._session.window.step()
        after.append(masters(module))
    assert largest_difference(*after) == 0
    assert largest_difference(after[0], saved) > 0
    runner.save_checkpoint(path)


@ranks(2)
def test_overwriting_keeps_a_whole_checkpoint(tmp_path: Path) -> None:
    """C20: overwriting writes a new tag, moves ``latest``, then deletes the old tag; nothing else is left."""
    path = tmp_path / "last.ckpt"
    module = Regression("adamw")
    runner = fitted(module, ZeroStrategy(stage=3))
    tags = []
    for _ in range(3):
        runner.save_checkpoint(path)
        tags.append((path / "latest").read_text())
        assert sorted(entry.name for entry in path.iterdir() if entry.is_dir()) == [tags[-1]]
    assert tags[0] != tags[1] != tags[2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


@ranks(2)
def test_a_failed_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """C17: a state that cannot be pickled is named on all ranks, and the checkpoint that was there still loads."""
    path = tmp_path / "last.ckpt"

    class Unpicklable(Regression):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if self.broken:
                checkpoint["tricks"] = {"easy": 1, "hard": lambda: 0}

        broken = False

    module = Unpicklable("adamw")
    runner = fitted(module, ZeroStrategy(stage=2))
    runner.save_checkpoint(path)
    before = (path / "latest").read_text()
    module.broken = True
    for target in (path, tmp_path / "new.ckpt"):
        with pytest.raises(CheckpointError, match=r"rank 0.*'tricks\.hard'"):
            runner.save_checkpoint(target)
    assert (path / "latest").read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
    module.broken = False
    fitted(Regression("adamw"), ZeroStrategy(stage=2), ckpt_path=path)


@ranks(2)
def test_model_checkpoint_on_folders(tmp_path: Path) -> None:
    """Lightning's ModelCheckpoint keeps the best two folders and ``last``, copied or linked; all load (C4)."""
    for link in (True, "link"):
        home = tmp_path / str(link)
        callback = ModelCheckpoint(home, monitor="val_loss", save_top_k=2, save_last=link)
        module = Regression("adamw")
        runner = trainer("zero2", epochs=4, callbacks=[callback], enable_checkpointing=True)
        runner.fit(module, loader(), loader())
        names = sorted(entry.name for entry in home.iterdir())
        assert len(names) == 3 and names[-1] == "last.ckpt", names
        for path in ("best", "last", callback.best_model_path, home / "last.ckpt" / "checkpoint"):
            if path == home / "last.ckpt" / "checkpoint" and not path.exists():
                continue
            [metrics] = runner.test(module, loader(), ckpt_path=path, verbose=False)
            if path == "best":
                assert metrics["test_loss"] == pytest.approx(float(callback.best_model_score), abs=1e-6)


@ranks(2)
def test_what_does_not_fit_is_told_on_all_ranks(tmp_path: Path) -> None:
    """C4, C14: a wrong path, another model, another stage: one error each on every rank, and nothing is changed."""
    path = tmp_path / "run.ckpt"
    runner = fitted(Regression("adamw"), ZeroStrategy(stage=3))
    runner.save_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"does not exist.*run\.ckpt"):
        fitted(Regression("adamw"), ZeroStrategy(stage=3), ckpt_path=tmp_path / "runn.ckpt")
    with pytest.raises(CheckpointError, match=r"missing.*unexpected|unexpected.*missing"):
        fitted(Regression("adamw", twice=True), ZeroStrategy(stage=3), ckpt_path=path)
    with pytest.raises(CheckpointError, match=r"stage 3 by 2 ranks.*stage 2"):
        fitted(Regression("adamw"), ZeroStrategy(stage=2, elastic=False), ckpt_path=path)
    if os.environ["RANK"] == "0":
        (path / "checkpoint" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    runner.strategy.barrier()
    with pytest.raises(CheckpointError, match="rank_1"):
        fitted(Regression("adamw"), ZeroStrategy(stage=3), ckpt_path=path)
    with pytest.raises(CheckpointError, match="remote URL"):
        runner.save_checkpoint("s3://bucket/run.ckpt")


@ranks(2)
def test_an_exception_on_one_rank_saves_nothing_and_does_not_hang(tmp_path: Path) -> None:
    """C19: a callback that saves on an exception, on the failing rank alone, neither hangs nor writes."""

    class Fails(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2 and os.environ["RANK"] == "1":
                raise RuntimeError("planned")
            return super().training_step(batch, batch_idx)

    class SavesOnException(Callback):
        def on_exception(self, trainer: L.Trainer, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / "exception.ckpt")

    if os.environ["RANK"] == "1":
        with pytest.raises(RuntimeError, match="planned"):
            fitted(Fails("sgd"), ZeroStrategy(stage=2), callbacks=[SavesOnException()])
        os._exit(0)
    with pytest.raises(RuntimeError):  # the connection to the rank that left
        fitted(Fails("sgd"), ZeroStrategy(stage=2), callbacks=[SavesOnException()])
    assert not (tmp_path / "exception.ckpt").exists()


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()
