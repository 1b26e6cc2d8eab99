"""The Trainer's precision holds, whatever type a checkpoint was saved in."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from tests.harness import ranks
from tests.models import trainer


class Pretrained(L.LightningModule):
    """A tiny causal language model, read from the folder ``model``."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        from transformers import LlamaForCausalLM

        if self.net is None:
            self.net = LlamaForCausalLM.from_pretrained("model")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@ranks(2)
def test_a_16_bit_checkpoint_under_32_true() -> None:
    """P4: a transformers checkpoint saved in bf16 is trained in the Trainer's fp32, from the same values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    torch.manual_seed(3)
    saved = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=11)).to(torch.bfloat16)
    if os.environ["RANK"] == "0":  # the other waits for it in the first fit, before it builds the model
        saved.save_pretrained("model")
    rows = torch.arange(40).reshape(8, 5) % 11
    for stage in (0, 1, 2, 3):
        module = Pretrained()
        trainer(ZeroStrategy(stage=stage), epochs=1).fit(module, DataLoader(rows, batch_size=2))
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}, stage
        for trained, before in zip(module.net.parameters(), saved.parameters(), strict=True):
            moved = (trained - before.float()).abs()
            assert 0 < moved.max() < 3e-3, stage  # two updates of at most 1e-3; bf16 would round most of them away
