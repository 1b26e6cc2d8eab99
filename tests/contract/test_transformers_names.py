"""transformers' undocumented names around the initial weights of a model."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.harness import ranks


def llama() -> Any:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.5,  # unlike torch's own defaults
    )
    return LlamaForCausalLM(config)


def test_a_model_fills_its_weights_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's constructor calls `PreTrainedModel.initialize_weights` once for all that is in it."""
    calls = []
    monkeypatch.setattr(PreTrainedModel, "initialize_weights", lambda model: calls.append(type(model).__name__))
    llama()
    assert calls[-1] == "LlamaForCausalLM"


def test_one_module_is_filled_by_its_model() -> None:
    """`_initialize_weights(module, is_custom_code)` fills one module, and `is_custom_code()` is its second argument."""
    assert list(inspect.signature(PreTrainedModel._initialize_weights).parameters)[1:] == ["module", "is_custom_code"]
    model = llama()
    assert model.is_custom_code() is False


@ranks(1)
def test_gathering_fills_what_transformers_fills() -> None:
    """On whole parameters our walk over the modules draws transformers' own initial weights, bit for bit."""
    from lightning_zero._compat.transformers import gathering_initialisation

    expected = llama().state_dict()
    before = PreTrainedModel.initialize_weights
    with gathering_initialisation(lambda parameters: nullcontext()):
        actual = llama().state_dict()
    assert PreTrainedModel.initialize_weights is before
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(actual[name], weight), name
