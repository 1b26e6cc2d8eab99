"""Folders of whole weights, written at the right moments from the right weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from lightning_zero import BestModelCheckpoint, ConfigError, GatheredWeightsCheckpoint, ZeroStrategy
from tests.callbacks.test_best_model import Rigged
from tests.harness import ranks
from tests.models import Regression, loader, trainer
from tests.strategies.gathering import read_folder
from tests.strategies.test_checkpoints import SaveAt, masters
from tests.strategies.test_gathered import Llama, sentences


class Recorder(Callback):
    """Remembers the masters after each update."""

    def __init__(self) -> None:
        self.masters: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        self.masters[trainer.global_step] = masters(module)


def holds(folder: Path, expected: dict[str, Tensor], dtype: torch.dtype) -> bool:
    tensors, _ = read_folder(folder)
    assert tensors.keys() == expected.keys()
    return all(torch.equal(tensors[name], value.to(dtype)) for name, value in expected.items())


@pytest.mark.parametrize("first", ["best", "gathered"])
@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_best_and_last_in_either_order(stage: int, first: str, tmp_path: Path) -> None:
    """In either order of the list, "best" and the default hold the best epoch's masters, "last" the last update's."""
    recorder = Recorder()
    best = BestModelCheckpoint(tmp_path / "checkpoints", monitor="score")
    gathered = [
        GatheredWeightsCheckpoint(tmp_path / "best", which="best"),
        GatheredWeightsCheckpoint(tmp_path / "last", which="last", dtype="float32"),
        GatheredWeightsCheckpoint(tmp_path / "default", dtype=None),
    ]
    callbacks = [best, *gathered] if first == "best" else [*gathered, best]
    runner = trainer(ZeroStrategy(stage=stage), epochs=4, callbacks=[*callbacks, recorder], enable_checkpointing=True)
    runner.fit(Rigged("adamw"), loader(), loader())
    assert holds(tmp_path / "best", recorder.masters[12], torch.bfloat16)
    assert holds(tmp_path / "default", recorder.masters[12], torch.float32)
    assert holds(tmp_path / "last", recorder.masters[24], torch.float32)
    assert not holds(tmp_path / "last", recorder.masters[12], torch.float32)


@ranks(2)
def test_intervals_and_retention(tmp_path: Path) -> None:
    """Saves between follow updates, not micro-batches; `keep_last` keeps the newest, also over a resume."""

    def run(epochs: int, **fit: Any) -> tuple[Recorder, L.Trainer]:
        recorder = Recorder()
        callbacks = [
            GatheredWeightsCheckpoint(tmp_path / "steps", every_n_train_steps=2, keep_last=2, dtype=None),
            GatheredWeightsCheckpoint(tmp_path / "epochs", every_n_epochs=2, save_on_train_end=False, dtype=None),
            recorder,
            SaveAt(tmp_path / "run.ckpt", 12),
        ]
        runner = trainer(ZeroStrategy(stage=3), epochs=epochs, callbacks=callbacks, accumulate_grad_batches=2)
        runner.fit(Regression("adamw"), loader(), **fit)
        return recorder, runner

    def folders(name: str) -> list[str]:
        return sorted(path.name for path in (tmp_path / name).iterdir() if path.is_dir())

    first, runner = run(2)  # three updates in an epoch
    runner.strategy.barrier()
    assert folders("steps") == ["step-4", "step-6"]
    assert folders("epochs") == ["step-6"]
    assert not (tmp_path / "epochs" / "model.safetensors").exists()
    assert holds(tmp_path / "steps" / "step-4", first.masters[4], torch.float32)
    assert holds(tmp_path / "steps", first.masters[6], torch.float32)
    second, runner = run(4, ckpt_path=tmp_path / "run.ckpt")
    runner.strategy.barrier()
    assert folders("steps") == ["step-10", "step-12"]
    assert folders("epochs") == ["step-12", "step-6"]
    assert holds(tmp_path / "steps" / "step-10", second.masters[10], torch.float32)


@ranks(2)
def test_a_tokenizer_and_small_files(tmp_path: Path) -> None:
    """The folder has the tokenizer's files and an index over files of the size asked for, and loads."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    callback = GatheredWeightsCheckpoint(tmp_path / "out", tokenizer=tokenizer, max_shard_size="2KB", module="net")
    module = Llama()
    runner = trainer(ZeroStrategy(stage=3), callbacks=[callback], epochs=1, precision="bf16-mixed")
    runner.fit(module, sentences())
    if runner.is_global_zero:
        assert AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids(["b"]) == [1]
        assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
        assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    runner.strategy.barrier()


@pytest.mark.parametrize("key", ["stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save"])
@ranks(1)
def test_a_config_that_forbids_it(key: str, tmp_path: Path) -> None:
    """36, 54: a config that says no beside the callback is refused before training; the callback turns it on itself."""
    config = {"zero_optimization": {"stage": 3, key: False}}
    callbacks = [GatheredWeightsCheckpoint(tmp_path / "out")]
    module = Regression("adamw")
    with pytest.raises(ConfigError, match=r"gather_16bit_weights_on_model_save.*GatheredWeightsCheckpoint"):
        trainer(ZeroStrategy(config=config), callbacks=callbacks, devices=1).fit(module, loader(ranks=1))
    assert module.net is None
    runner = trainer(ZeroStrategy(stage=3), callbacks=callbacks, devices=1)
    runner.fit(module, loader(ranks=1))
    assert runner.strategy.resolved.config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


@ranks(1)
def test_refused_before_training(tmp_path: Path) -> None:
    """A strategy that is not ours, a best that nobody puts back, a part that is not there: told before a step."""
    cases: list[tuple[Any, list[Callback], str]] = [
        ("ddp", [GatheredWeightsCheckpoint(tmp_path)], r"this run has DDPStrategy.*strategy='zero2'"),
        (
            "zero2",
            [GatheredWeightsCheckpoint(tmp_path, which="best"), ModelCheckpoint(tmp_path)],
            r"Add BestModelCheckpoint",
        ),
        ("zero2", [GatheredWeightsCheckpoint(tmp_path, module="nett")], r"module='nett' is not a part of Regression"),
    ]
    for strategy, callbacks, match in cases:
        module = Regression("adamw")
        runner = trainer(strategy, callbacks=callbacks, devices=1, enable_checkpointing=True)
        with pytest.raises(ConfigError, match=match):
            runner.fit(module, loader(ranks=1))
        assert module.losses == []


@ranks(1)
def test_a_trial_run_writes_nothing(tmp_path: Path) -> None:
    """`fast_dev_run` tries the code and leaves no folder."""
    callback = GatheredWeightsCheckpoint(tmp_path / "out", every_n_train_steps=1)
    trainer("zero2", callbacks=[callback], devices=1, fast_dev_run=True).fit(Regression("adamw"), loader(ranks=1))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"which": "worst"}, r"which='worst' is not known"),
        ({"every_n_epochs": 0}, r"every_n_epochs=0 must be at least 1"),
        ({"keep_last": 0}, r"keep_last=0 must be at least 1"),
        ({"save_on_train_end": False}, r"would never write"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], match: str) -> None:
    """A callback that could not do what it is asked for is refused when it is made."""
    with pytest.raises(ConfigError, match=match):
        GatheredWeightsCheckpoint("out", **arguments)
