"""PEFT's adapters at stage 3: trained, resumed, exported, merged."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero import CheckpointError, ZeroStrategy
from tests import pretrained
from tests.harness import ranks
from tests.models import trainer, whole_weights


class Adapted(pretrained.Pretrained):
    """A Llama with LoRA and a trained copy of its head."""

    def __init__(self) -> None:
        super().__init__("llama")
        self.initial: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        from peft import LoraConfig, get_peft_model

        if self.nets is None:
            super().configure_model()
            torch.manual_seed(6)
            config = LoraConfig(r=3, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
            self.nets["llama"] = get_peft_model(self.nets["llama"], config)

    def on_fit_start(self) -> None:
        self.initial = whole_weights(self)


def fitted(stage: int, epochs: int, **options: Any) -> tuple[Adapted, Any]:
    module = Adapted()
    overrides = {"zero_optimization.stage3_param_persistence_threshold": 0} if stage == 3 else None
    run = trainer(ZeroStrategy(stage=stage, overrides=overrides), epochs=epochs)  # type: ignore[arg-type]
    run.fit(module, pretrained.tokens(4, ranks=2), **options)
    return module, run


class Reloaded(pretrained.Pretrained):
    """A Llama with adapters read from a folder."""

    def configure_model(self) -> None:
        from peft import PeftModel

        if self.nets is None:
            super().configure_model()
            self.nets["llama"] = PeftModel.from_pretrained(self.nets["llama"], "adapters", is_trainable=True)


@ranks(2)
def test_adapters_train_resume_and_are_exported() -> None:
    """W9: LoRA and a copied head begin at stage 3 with the values that the seed gives at stage 0, learn alike through a
    checkpoint and a resume, and are exported to a folder that ``PeftModel.from_pretrained`` reads; merged there into
    the base model they give the trained model. ``save_pretrained`` of the sharded model is refused (W8).
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    pretrained.save({"llama": pretrained.whole_models()["llama"]})
    expected, _ = fitted(0, 2)
    first, run = fitted(3, 1)
    for name, value in expected.initial.items():
        assert torch.equal(first.initial[name], value), name
    adapters = {name: value for name, value in first.initial.items() if "lora_B" in name}
    assert len(adapters) == 4 and not any(value.any() for value in adapters.values())
    run.save_checkpoint("one.ckpt")
    assert not list(Path("one.ckpt").rglob("config.json"))  # by which a folder would pass for a model without adapters
    with pytest.raises(CheckpointError, match="save_gathered_weights"):
        first.nets["llama"].save_pretrained("refused")

    module, run = fitted(3, 2, ckpt_path="one.ckpt")
    assert len(first.losses) == len(module.losses) == 4
    assert torch.allclose(torch.tensor(first.losses + module.losses), torch.tensor(expected.losses), atol=2e-5)

    run.strategy.save_gathered_weights("adapters")
    assert sorted(path.name for path in Path("adapters").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    base = AutoModelForCausalLM.from_pretrained("models/llama")
    loaded = PeftModel.from_pretrained(base, "adapters")
    weights = whole_weights(module.nets["llama"])
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    batch = torch.arange(3, 9)[None]
    logits = loaded(batch).logits
    with run.strategy.generation_context(), torch.no_grad():
        assert torch.allclose(module.nets["llama"](batch).logits, logits, atol=1e-5)

    other = Reloaded("llama")
    other.on_fit_start = lambda: initial.update(whole_weights(other.nets["llama"]))  # type: ignore[method-assign]
    initial: dict[str, Tensor] = {}
    trainer(ZeroStrategy(stage=3), epochs=1).fit(other, pretrained.tokens(1, ranks=2))
    assert all(hasattr(parameter, "ds_id") for parameter in other.parameters())
    assert initial.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(initial[name], value), name

    merged = loaded.merge_and_unload()
    if os.environ["RANK"] == "0":
        merged.save_pretrained("merged")
        again = AutoModelForCausalLM.from_pretrained("merged")
        assert torch.allclose(again(batch).logits, logits, atol=1e-5)
        assert not torch.allclose(AutoModelForCausalLM.from_pretrained("models/llama")(batch).logits, logits, atol=1e-2)
    run.strategy.barrier()


@ranks(2)
def test_adapters_in_16_bits() -> None:
    """Under ``bf16-mixed`` PEFT casts new adapters to fp32; at stage 3 they are sharded in bf16 all the same, without
    a warning about whole parameters, with the values of stage 0, and learn.
    """
    pretrained.save({"llama": pretrained.whole_models()["llama"]})
    losses = {}
    initial = {}
    for stage in (3, 0):
        module = Adapted()
        run = trainer(ZeroStrategy(stage=stage), epochs=1, precision="bf16-mixed")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*exist whole on every rank")
            run.fit(module, pretrained.tokens(2, ranks=2))
        assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
        initial[stage], losses[stage] = module.initial, torch.tensor(module.losses)
    for name, value in initial[0].items():
        assert torch.equal(initial[3][name], value.bfloat16().float()), name
    assert torch.allclose(losses[3], losses[0], atol=0.05)
