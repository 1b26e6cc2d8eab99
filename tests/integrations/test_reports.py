"""What a load under ZeRO-3 says, and for how long transformers takes models to be sharded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from transformers.integrations import is_deepspeed_zero3_enabled

from lightning_zero import ZeroStrategy
from tests import pretrained
from tests.harness import ranks
from tests.models import Regression, loader, trainer, whole_weights


class Loading(pretrained.Pretrained):
    """Loads one checkpoint into a model of another shape, and keeps what was reported.

    Args:
        model: A class of transformers' models.
        options: For ``from_pretrained``.
    """

    def __init__(self, model: str, folder: str, **options: Any) -> None:
        super().__init__(folder=folder, **options)
        self.model = model
        self.report: dict[str, Any] = {}

    def configure_model(self) -> None:
        import transformers as hf

        if self.nets is None:
            torch.manual_seed(13)
            self.nets, self.report = getattr(hf, self.model).from_pretrained(
                self.folder, output_loading_info=True, **self.options
            )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.nets(input_ids=batch, labels=batch[:, 0] % 3).loss  # type: ignore[no-any-return]


def built(module: Loading, stage: int, world_size: int) -> dict[str, Tensor]:
    """The whole weights of a module as its fit starts."""
    weights: dict[str, Tensor] = {}
    module.on_fit_start = lambda: weights.update(whole_weights(module))  # type: ignore[method-assign]
    trainer(ZeroStrategy(stage=stage), epochs=1, devices=world_size).fit(module, pretrained.tokens(1, ranks=world_size))
    return weights


@ranks(2, env={"HF_HUB_OFFLINE": "1"})
def test_missing_unexpected_and_mismatched_names_are_told() -> None:
    """M2: a head of 3 labels over one of 2 is drawn anew, alike on all ranks and as at stage 0; the rest is loaded;
    all that did not fit is reported as there. Without ``ignore_mismatched_sizes`` every rank raises, and so it does for
    a wrong path and for a folder without a config.
    """
    import transformers as hf

    torch.manual_seed(1)
    saved = hf.LlamaForSequenceClassification(pretrained.llama_config(num_labels=2))
    saved.register_buffer("left_over", torch.ones(2))
    del saved.model.norm.weight
    pretrained.save({"model": saved}, ".", max_shard_size="4KB")
    reports = {}
    weights = {}
    for stage in (3, 0):
        module = Loading("LlamaForSequenceClassification", "model", num_labels=3, ignore_mismatched_sizes=True)
        weights[stage] = built(module, stage, 2)
        reports[stage] = module.report
    assert reports[3] == reports[0]
    assert {kind: len(names) for kind, names in reports[3].items()} == {
        "missing_keys": 1,
        "unexpected_keys": 1,
        "mismatched_keys": 1,
        "error_msgs": 0,
    }
    for name, value in weights[0].items():
        assert torch.equal(weights[3][name], value), name
    assert weights[3]["nets.score.weight"].std() > 0.15  # initializer_range 0.3; torch's default would be 0.14

    for folder, options, message in (
        ("model", {"num_labels": 3}, "ignore_mismatched_sizes"),
        (str(Path("nowhere").absolute()), {}, "nowhere"),
        ("empty", {}, "model.safetensors.*empty"),
    ):
        Path("empty").mkdir(exist_ok=True)
        module = Loading("LlamaForSequenceClassification", folder, **options)
        with pytest.raises((RuntimeError, OSError), match=message):
            built(module, 3, 2)
        assert not is_deepspeed_zero3_enabled()


@ranks(2)
def test_a_checkpoint_of_another_architecture() -> None:
    """A BERT read into a Llama at stage 3: the same report as at stage 0, on all ranks, and no hang."""
    import transformers as hf

    layers = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    pretrained.save({"model": hf.BertModel(hf.BertConfig(**layers, vocab_size=pretrained.VOCABULARY))}, ".")
    options: dict[str, Any] = {"config": pretrained.llama_config(num_labels=3, pad_token_id=0)}
    reports = {}
    for stage in (3, 0):
        module = Loading("LlamaForSequenceClassification", "model", **options)
        built(module, stage, 2)
        reports[stage] = module.report
    assert reports[3] == reports[0]
    assert len(reports[3]["unexpected_keys"]) > 10 and len(reports[3]["missing_keys"]) > 10


class Watched(Regression):
    """Notes where the marker is on, and builds other models on the way."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.seen: dict[str, bool] = {}
        self.teachers: list[Any] = []

    def see(self, place: str) -> None:
        self.seen[place] = is_deepspeed_zero3_enabled()

    def configure_model(self) -> None:
        import transformers as hf

        if self.net is None:
            super().configure_model()
            self.see("configure_model")
            with self.trainer.strategy.unsharded():  # type: ignore[attr-defined]
                self.see("unsharded")
                self.teachers.append(hf.LlamaForCausalLM.from_pretrained("models/llama"))
                self.teachers.append(torch.nn.Linear(3, 2))
            self.second = torch.nn.Linear(3, 2)
            torch.nn.init.constant_(self.second.weight, 2.5)  # by then sharded
            self.see("configure_model again")

    def on_train_start(self) -> None:
        import transformers as hf

        self.see("on_train_start")
        self.teachers.append(hf.LlamaForCausalLM.from_pretrained("models/llama"))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.see("training_step")
        return super().training_step(batch, batch_idx) + 0 * self.second(torch.ones(3)).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.see("validation_step")

    def on_validation_epoch_end(self) -> None:
        self.see("on_validation_epoch_end")
        if self.trainer.sanity_checking:
            return
        raise RuntimeError("planned")


@ranks(2)
def test_the_marker_is_on_while_models_are_built_and_steps_run() -> None:
    """M3: on in ``configure_model`` and in steps; off in hooks, in ``unsharded()``, after an exception and for a
    stage-2 Trainer that follows. Models built or loaded where it is off are whole, ``torch.nn.init`` fills what is
    sharded, and ``generation_context()`` turns the marker on for as long as it lasts.
    """
    pretrained.save({"llama": pretrained.whole_models()["llama"]})
    expected = {
        "configure_model": True,
        "unsharded": False,
        "configure_model again": True,
        "on_train_start": False,
        "training_step": True,
        "validation_step": True,
        "on_validation_epoch_end": False,
    }
    module = Watched()
    run = trainer(ZeroStrategy(stage=3))
    with pytest.raises(RuntimeError, match="planned"):
        run.fit(module, loader(), loader())
    assert module.seen == expected
    assert not is_deepspeed_zero3_enabled()
    for teacher in module.teachers:
        assert all(parameter.numel() > 0 for parameter in teacher.parameters())
    assert len(module.teachers) == 3
    assert all(hasattr(parameter, "ds_id") for parameter in module.parameters())
    assert whole_weights(module.second)["weight"].mean() == pytest.approx(2.5)
    with run.strategy.generation_context():  # type: ignore[attr-defined]
        assert is_deepspeed_zero3_enabled()
    assert not is_deepspeed_zero3_enabled()

    other = Watched()
    after = trainer(ZeroStrategy(stage=2))
    with pytest.raises(RuntimeError, match="planned"):
        after.fit(other, loader(), loader())
    assert set(other.seen.values()) == {False} and other.seen.keys() == expected.keys()
    with after.strategy.generation_context():  # type: ignore[attr-defined]
        assert not is_deepspeed_zero3_enabled()
    assert os.environ.get("HF_DEACTIVATE_ASYNC_LOAD") is None
    assert isinstance(other, L.LightningModule) and all(p.numel() > 0 for p in other.parameters())
