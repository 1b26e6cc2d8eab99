"""What stage 3 does to a model while it is built and run: the same initial weights, one trace for each step."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_zero import ZeroStrategy
from tests.harness import ranks
from tests.models import Regression, largest_difference, loader, trainer, whole_weights

CONFIG = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,  # far from torch's defaults
}


class Llama(Regression):
    """A language model from a config, built in ``configure_model``."""

    def __init__(self, **config: Any) -> None:
        super().__init__("adamw", scheduler=False)
        self.config = LlamaConfig(**{**CONFIG, **config})

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(7)
            self.net = LlamaForCausalLM(self.config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = (batch[0].abs() * 10).long() % 37
        loss: Tensor = self.net(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.item())
        return loss


@pytest.mark.parametrize("config", [{}, {"pad_token_id": 0}, {"tie_word_embeddings": True}], ids=str)
@ranks(2)
def test_initial_weights_are_those_of_an_unsharded_model(config: dict[str, Any]) -> None:
    """A transformers model built sharded in fp32 has the weights and the losses that the seed gives unsharded."""
    torch.manual_seed(7)
    expected = LlamaForCausalLM(LlamaConfig(**{**CONFIG, **config}))
    module = Llama(**config)
    initial: dict[str, Tensor] = {}
    module.on_fit_start = lambda: initial.update(whole_weights(module.net))  # type: ignore[method-assign]
    trainer(ZeroStrategy(stage=3)).fit(module, loader())
    assert largest_difference(initial, {name: p.detach() for name, p in expected.named_parameters()}) == 0
    other = Llama(**config)
    trainer(ZeroStrategy(stage=2)).fit(other, loader())
    assert module.losses == pytest.approx(other.losses, abs=1e-5)


@ranks(2)
def test_initial_weights_in_16_bits_are_those_of_an_unsharded_model() -> None:
    """Under ``bf16-mixed`` a model built sharded has the weights that the seed gives in fp32, cast; and so has one of
    torch's own modules.
    """
    torch.manual_seed(7)
    expected = LlamaForCausalLM(LlamaConfig(**CONFIG))
    module = Llama()
    other = Regression("sgd")
    torch.manual_seed(11)
    plain = torch.nn.Linear(7, 13)  # the first of its layers, by its own seed
    initial: dict[str, Tensor] = {}
    for model in (module, other):
        model.on_fit_start = lambda model=model: initial.update(whole_weights(model.net))  # type: ignore[method-assign]
        trainer(ZeroStrategy(stage=3), epochs=1, precision="bf16-mixed").fit(model, loader(batches=1))
    for name, parameter in expected.named_parameters():
        assert torch.equal(initial[name], parameter.bfloat16().float()), name
    assert torch.equal(initial["0.weight"], plain.weight.bfloat16().float())


@ranks(1)
def test_transformers_is_left_as_it_was() -> None:
    """After a run, and after one whose ``configure_model`` raises, transformers initialises as ever."""
    before = LlamaForCausalLM.initialize_weights

    class Broken(Llama):
        def configure_model(self) -> None:
            raise RuntimeError("planned")

    trainer(ZeroStrategy(stage=3), devices=1).fit(Llama(), loader(ranks=1))
    with pytest.raises(RuntimeError, match="planned"):
        trainer(ZeroStrategy(stage=3), devices=1).fit(Broken(), loader(ranks=1))
    assert LlamaForCausalLM.initialize_weights is before


@ranks(2)
def test_nested_forward_keeps_the_trace() -> None:
    """``self(batch)`` inside a ``training_step`` does not keep stage 3 from learning the order of its parameters."""
    module = Regression("sgd")
    overrides = {"zero_optimization.stage3_param_persistence_threshold": 0}
    runner = trainer(ZeroStrategy(stage=3, overrides=overrides))
    runner.fit(module, loader())
    assert runner.model.optimizer.parameter_offload.get_param_coordinator().is_complete_trace()


@ranks(2)
def test_training_starts_no_processes() -> None:
    """On CPU, DeepSpeed does not start a process to count devices at every reduction."""
    started: list[str] = []
    counting = [False]

    def audit(event: str, arguments: Any) -> None:
        if counting[0] and event in ("subprocess.Popen", "os.posix_spawn", "os.exec"):
            started.append(str(arguments[0]))

    sys.addaudithook(audit)

    class Watched(Regression):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            counting[0] = True

        def on_train_end(self) -> None:
            counting[0] = False

    trainer(ZeroStrategy(stage=3)).fit(Watched("sgd"), loader())
    assert started == []
