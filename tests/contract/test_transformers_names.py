"""transformers' undocumented names around initial weights, loading and the ZeRO-3 marker."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, modeling_utils
from transformers.integrations import HfDeepSpeedConfig, deepspeed, is_deepspeed_zero3_enabled

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


MARKER = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
REPLACED = [
    (PreTrainedModel, "get_init_context"),
    (PreTrainedModel, "_load_pretrained_model"),
    (PreTrainedModel, "_initialize_missing_keys"),
    (modeling_utils, "_tied_params_are_equal"),
]


@ranks(1)
def test_the_marker_is_what_it_was_before() -> None:
    """`_hf_deepspeed_config_weak_ref` holds the marker: ours inside, the user's own or none afterwards."""
    from lightning_zero._compat.transformers_zero3 import make_marker, marked

    marker = make_marker(MARKER)
    assert not is_deepspeed_zero3_enabled()
    with marked(marker):
        assert is_deepspeed_zero3_enabled()
        with marked(None):
            assert not is_deepspeed_zero3_enabled()
        assert is_deepspeed_zero3_enabled()
    assert deepspeed._hf_deepspeed_config_weak_ref is None
    theirs = HfDeepSpeedConfig(MARKER)
    try:
        with pytest.raises(RuntimeError, match="planned"), marked(marker):
            raise RuntimeError("planned")
        assert deepspeed._hf_deepspeed_config_weak_ref() is theirs
    finally:
        deepspeed.unset_hf_deepspeed_config()


@ranks(1)
def test_the_loader_finds_what_transformers_finds(tmp_path: Path) -> None:
    """On whole parameters our loader gives `from_pretrained`'s values and report; a rank that does not write reads
    nothing, and finds the same.
    """
    from lightning_zero._compat.transformers_zero3 import inside_zero_init, loading_into_shards, make_marker, marked

    saved = llama()
    del saved.model.norm.weight
    saved.register_buffer("left_over", torch.ones(2))
    saved.lm_head = torch.nn.Linear(8, 12, bias=False)
    saved.save_pretrained(tmp_path, max_shard_size="1KB")
    options: dict[str, Any] = {"ignore_mismatched_sizes": True, "output_loading_info": True}
    torch.manual_seed(1)
    expected, report = LlamaForCausalLM.from_pretrained(tmp_path, **options)
    assert [len(report[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [1, 1, 1]
    before = [vars(owner)[name] for owner, name in REPLACED]

    def whole_shape(tensor: Any) -> torch.Size | None:
        return tensor.shape if isinstance(tensor, torch.nn.Parameter) else None

    for writer in (True, False):
        torch.manual_seed(1)
        with (
            marked(make_marker(MARKER)),
            inside_zero_init(),
            loading_into_shards(lambda parameters: nullcontext(), whole_shape=whole_shape, writer=writer),
        ):
            actual, ours = LlamaForCausalLM.from_pretrained(tmp_path, **options)
        assert [vars(owner)[name] for owner, name in REPLACED] == before
        assert ours == report
        equal = {name: torch.equal(p, expected.get_parameter(name)) for name, p in actual.named_parameters()}
        assert all(equal.values()) == writer
        assert all(getattr(p, "_is_hf_initialized", False) for name, p in actual.named_parameters() if "layers" in name)
