"""Tiny transformers models of each kind, saved to folders, and a LightningModule that trains them together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

VOCABULARY = 32
TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def llama_config(**changes: Any) -> Any:
    """A tiny Llama; its initial weights are far from torch's defaults."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(**{**TEXT, **sizes, "initializer_range": 0.3, **changes})


def whole_models() -> dict[str, Any]:
    """One model of each kind: a decoder, an encoder, a pair with tied embeddings, two for images (of which one has
    running statistics), one with experts.
    """
    import transformers as hf

    torch.manual_seed(3)
    layers = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    resnet = hf.ResNetForImageClassification(
        hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", num_labels=3)
    )
    for name, buffer in resnet.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5)
    return {
        "resnet": resnet,
        "llama": hf.LlamaForCausalLM(llama_config()),
        "bert": hf.BertForMaskedLM(hf.BertConfig(**TEXT, **layers, **no_dropout, max_position_embeddings=16)),
        "t5": hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=VOCABULARY,
                d_model=16,
                d_kv=8,
                d_ff=24,
                num_layers=2,
                num_heads=2,
                dropout_rate=0.0,
                pad_token_id=0,
                eos_token_id=2,
                decoder_start_token_id=0,
            )
        ),
        "vit": hf.ViTForImageClassification(
            hf.ViTConfig(**layers, **no_dropout, image_size=8, patch_size=4, num_labels=3)
        ),
        "mixtral": hf.MixtralForCausalLM(
            hf.MixtralConfig(
                **TEXT, **layers, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2, head_dim=8
            )
        ),
    }


def save(models: dict[str, Any], folder: Path | str = "models", **options: Any) -> None:
    """Saves models by rank 0; the others wait for it when the Trainer joins them."""
    if os.environ.get("RANK", "0") == "0":
        for name, model in models.items():
            model.save_pretrained(Path(folder) / name, **options)


class Pretrained(L.LightningModule):
    """Models read from folders in ``configure_model``, each with its own loss, trained side by side.

    Args:
        names: Which of the folders.
        folder: Where they are.
        options: For ``from_pretrained``.
    """

    def __init__(self, *names: str, folder: str = "models", **options: Any) -> None:
        super().__init__()
        self.names = names
        self.folder = folder
        self.options = options
        self.nets: Any = None
        self.losses: list[list[float]] = []

    def configure_model(self) -> None:
        import transformers as hf

        if self.nets is not None:
            return
        classes = {
            "bert": hf.AutoModelForMaskedLM,
            "t5": hf.AutoModelForSeq2SeqLM,
            "vit": hf.AutoModelForImageClassification,
            "resnet": hf.AutoModelForImageClassification,
        }
        self.nets = torch.nn.ModuleDict(
            {
                name: classes.get(name, hf.AutoModelForCausalLM).from_pretrained(
                    Path(self.folder) / name, **self.options
                )
                for name in self.names
            }
        )

    def loss_of(self, name: str, tokens: Tensor) -> Tensor:
        if name in ("vit", "resnet"):
            pixels = (tokens[:, :1, None, None] + torch.arange(192).view(1, 3, 8, 8)) % 7 / 7.0
            loss: Tensor = self.nets[name](pixel_values=pixels.to(self.dtype), labels=tokens[:, 0] % 3).loss
        else:
            loss = self.nets[name](input_ids=tokens, labels=tokens).loss
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        losses = [self.loss_of(name, batch) for name in self.names]
        self.losses.append([loss.item() for loss in losses])
        return torch.stack(losses).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def tokens(batches: int, *, ranks: int, batch_size: int = 2, length: int = 6) -> DataLoader[Any]:
    """Rows of tokens, none of them special, others on each rank."""
    generator = torch.Generator().manual_seed(9)
    rows = torch.randint(3, VOCABULARY, (batches * ranks * batch_size, length), generator=generator)
    return DataLoader(rows, batch_size=batch_size)  # type: ignore[arg-type]
