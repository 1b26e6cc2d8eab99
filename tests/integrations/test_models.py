"""What transformers models do in a run at stage 3: grow a vocabulary, generate, recompute, choose experts."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from tests import pretrained
from tests.harness import ranks
from tests.models import Regression, largest_difference, loader, trainer, whole_weights

RESIZES: dict[str, dict[str, Any]] = {
    "tied mean": {"tied": True, "mean_resizing": True},
    "tied": {"tied": True, "mean_resizing": False},
    "untied mean": {"tied": False, "mean_resizing": True},
    "untied": {"tied": False, "mean_resizing": False},
    "smaller": {"tied": False, "mean_resizing": True},
}


def resized(folder: str, case: str) -> Any:
    """A model with three tokens more, padded to a multiple of 8; or with fewer."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder)
    torch.manual_seed(17)
    if case == "smaller":
        model.resize_token_embeddings(20)
    else:
        mean_resizing = RESIZES[case]["mean_resizing"]
        model.resize_token_embeddings(pretrained.VOCABULARY + 3, pad_to_multiple_of=8, mean_resizing=mean_resizing)
    return model


class Resized(pretrained.Pretrained):
    def configure_model(self) -> None:
        if self.nets is None:
            self.nets = nn.ModuleDict({case: resized(f"models/{case}", case) for case in self.names})


@ranks(2)
def test_a_vocabulary_grows() -> None:
    """M4: embeddings are resized at stage 3, tied and untied, with ``mean_resizing`` and without, to the very values of
    an unsharded model; they train, and what is exported reloads with the new vocabulary.
    """
    from transformers import LlamaForCausalLM

    torch.manual_seed(2)
    saved = {
        case: LlamaForCausalLM(pretrained.llama_config(tie_word_embeddings=options["tied"]))
        for case, options in RESIZES.items()
    }
    pretrained.save(saved)
    module = Resized(*RESIZES)
    initial: dict[str, Tensor] = {}
    module.on_fit_start = lambda: initial.update(whole_weights(module.nets))  # type: ignore[method-assign]
    rows = torch.arange(32).reshape(8, 4) % 20
    run = trainer(ZeroStrategy(stage=3), epochs=1)
    run.fit(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    expected = nn.ModuleDict({case: resized(f"models/{case}", case) for case in RESIZES})
    assert initial.keys() == dict(expected.named_parameters()).keys()
    for name, value in expected.named_parameters():
        assert torch.allclose(initial[name], value, atol=1e-6), name
    trained = whole_weights(module.nets)
    for case, options in RESIZES.items():
        vocabulary = 20 if case == "smaller" else 40
        run.strategy.save_gathered_weights(f"out/{case}", module=f"nets.{case}")  # type: ignore[attr-defined]
        model = LlamaForCausalLM.from_pretrained(f"out/{case}")
        assert model.config.vocab_size == model.lm_head.weight.shape[0] == vocabulary
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == options["tied"]
        for name, value in model.named_parameters():
            assert torch.equal(value, trained[f"{case}.{name}"]), (case, name)


class Generating(pretrained.Pretrained):
    """Generates more tokens on one rank than on the other, in validation, prediction and training."""

    def generate(self) -> Tensor:
        prompt = torch.tensor([[5, 6, 7]])
        more = 6 if self.trainer.global_rank else 2
        options = {"max_new_tokens": more, "min_new_tokens": more, "do_sample": False, "pad_token_id": 0}
        tokens: Tensor = self.nets["llama"].generate(prompt, **options)
        return tokens

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.generate()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.generated.append(self.generate())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.generate()

    def on_fit_start(self) -> None:
        self.generated: list[Tensor] = []


@ranks(2)
def test_ranks_generate_as_long_as_they_like() -> None:
    """M7: ``generate`` in training, validation, prediction and after ``fit`` at stage 3, with ranks that stop at
    different lengths: no hang, the tokens of a whole model with the same weights, and the losses of stage 0.
    """
    pretrained.save({"llama": pretrained.whole_models()["llama"]})
    data = pretrained.tokens(2, ranks=2)
    module = Generating("llama")
    overrides = {"zero_optimization.stage3_param_persistence_threshold": 0}
    run = trainer(ZeroStrategy(stage=3, overrides=overrides), epochs=2, num_sanity_val_steps=1)
    run.fit(module, data, data)
    assert len(module.generated) == 5
    [predicted, *_] = run.predict(module, data)  # type: ignore[misc]
    with run.strategy.generation_context(), torch.no_grad():  # type: ignore[attr-defined]
        later = module.generate()
    run.strategy.save_gathered_weights("out")  # type: ignore[attr-defined]
    from transformers import LlamaForCausalLM

    whole = LlamaForCausalLM.from_pretrained("out")
    more = 6 if os.environ["RANK"] == "1" else 2
    expected = whole.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=more, min_new_tokens=more, do_sample=False)
    assert expected.shape == (1, 3 + more)
    for tokens in (module.generated[-1], predicted, later):
        assert torch.equal(tokens, expected)

    unsharded = pretrained.Pretrained("llama")
    trainer(ZeroStrategy(stage=0), epochs=2).fit(unsharded, data)
    assert torch.allclose(torch.tensor(module.losses), torch.tensor(unsharded.losses), atol=2e-5)

    fresh = Generating("llama")  # predict alone, on an engine of its own
    [alone, *_] = trainer(ZeroStrategy(stage=3)).predict(fresh, data)  # type: ignore[misc]
    assert alone.shape == (1, 3 + more)


class Recomputing(pretrained.Pretrained):
    """Two models with their norms frozen, that recompute activations, one in each of torch's ways, or do not."""

    recompute = True

    def configure_model(self) -> None:
        if self.nets is not None:
            return
        super().configure_model()
        for name, net in self.nets.items():
            net.train()
            if self.recompute:
                net.gradient_checkpointing_enable({"use_reentrant": name == "reentrant"})
                net.enable_input_require_grads()
            for part, parameter in net.named_parameters():
                if "norm" in part:
                    parameter.requires_grad_(False)


@ranks(2)
def test_activations_are_recomputed_over_frozen_norms() -> None:
    """M5: gradient checkpointing, reentrant and not, with frozen norms, learns at stage 3 as at stage 0 without it."""
    llama = pretrained.whole_models()["llama"]
    pretrained.save({"reentrant": llama, "other": llama})
    losses = []
    for stage in (3, 0):
        module = Recomputing("reentrant", "other")
        module.recompute = stage == 3
        overrides = {"zero_optimization.stage3_param_persistence_threshold": 0} if stage == 3 else None
        trainer(ZeroStrategy(stage=stage, overrides=overrides)).fit(module, pretrained.tokens(4, ranks=2))  # type: ignore[arg-type]
        losses.append(torch.tensor(module.losses))
        assert all(net.is_gradient_checkpointing == (stage == 3) for net in module.nets.values())
    assert losses[0].shape == (8, 2)
    assert torch.allclose(*losses, atol=2e-5)


class Mixture(nn.Module):
    """A layer whose experts are modules of their own, of which a row goes to one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(7, 3) for _ in range(3)])

    def forward(self, rows: Tensor) -> Tensor:
        chosen = self.experts[int(os.environ["RANK"])]  # no row of a rank goes to another rank's expert, or to the last
        result: Tensor = chosen(rows)
        return result


class Experts(Regression):
    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(4)
            self.net = nn.Sequential(nn.Linear(7, 7), Mixture(), nn.Tanh(), nn.Linear(3, 3))


@ranks(2)
def test_an_expert_without_a_token() -> None:
    """An expert that one rank never calls, and one that nobody calls, keep no rank waiting at stage 3, and learn as at
    stage 0.
    """
    weights = []
    for stage in (3, 0):
        module = Experts("sgd", scheduler=False)
        overrides = {"zero_optimization.stage3_param_persistence_threshold": 0}
        run = trainer(ZeroStrategy(stage=stage, overrides=overrides if stage == 3 else None), epochs=1)
        run.fit(module, loader(), loader())
        weights.append(whole_weights(module))
    assert largest_difference(*weights) < 1e-6


class Tied(nn.Module):
    """An embedding whose weight is used again outside the embedding's own forward, and a convolution used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.convolution = nn.Conv1d(6, 6, 3, padding=1)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.embedding((rows.abs() * 5).long() % 11).transpose(1, 2)
        hidden = self.convolution(torch.tanh(self.convolution(hidden))).mean(2)
        return nn.functional.linear(hidden, self.embedding.weight)[:, :3]


class UsedOutside(Regression):
    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(4)
            self.net = Tied()


@ranks(2)
def test_a_weight_used_outside_its_module() -> None:
    """M6: ``F.linear(x, self.embedding.weight)`` and a convolution used twice in a step learn as at stage 0."""
    weights = []
    for stage in (3, 0):
        module = UsedOutside("sgd", scheduler=False)
        overrides = {"zero_optimization.stage3_param_persistence_threshold": 0}
        run = trainer(ZeroStrategy(stage=stage, overrides=overrides if stage == 3 else None), epochs=1)
        run.fit(module, loader(), loader())
        weights.append(whole_weights(module))
    assert largest_difference(*weights) < 1e-6
