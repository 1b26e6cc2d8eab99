"""A byte-level Llama and the text it learns: the help topics that ship with Python."""

from __future__ import annotations

import math
import pydoc_data.topics
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

BOS, EOS = 256, 257  # after the 256 bytes
VOCABULARY = 258


class PythonTopics(L.LightningDataModule):
    """Python's help topics as bytes, cut into windows; the last twentieth validates.

    Args:
        window: Bytes in one sample.
        batch_size: Samples in one process's micro-batch.
    """

    def __init__(self, window: int = 128, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        topics = pydoc_data.topics.topics
        text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
        windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, window, window)
        held_out = len(windows) // 20
        self.train_windows, self.val_windows = windows[:-held_out], windows[-held_out:]

    def train_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.train_windows, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.val_windows)

    def test_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.val_windows)

    def _loader(self, windows: Tensor, *, shuffle: bool = False) -> DataLoader[Tensor]:
        # A tensor is a dataset of its rows. All batches are whole, so that every step does the same work.
        dataset: Dataset[Tensor] = windows  # type: ignore[assignment]
        return DataLoader(dataset, self.hparams.batch_size, shuffle=shuffle, drop_last=True)


class ByteLlama(L.LightningModule):
    """A Llama over bytes, built by ``configure_model``, so that at stage 3 its parameters are sharded at birth.

    Args:
        hidden_size: Width of the model.
        layers: Number of decoder layers.
        heads: Number of attention heads.
        learning_rate: Peak of the learning rate.
        warmup_steps: Updates until the peak; a cosine leads to a tenth of it at the end of training.
        weight_decay: AdamW's weight decay.
    """

    def __init__(
        self,
        hidden_size: int = 256,
        layers: int = 4,
        heads: int = 4,
        learning_rate: float = 2e-3,
        warmup_steps: int = 20,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: LlamaForCausalLM | None = None

    def configure_model(self) -> None:
        if self.net is not None:  # Lightning calls this hook before every run
            return
        self.net = byte_llama(self.hparams.hidden_size, self.hparams.layers, self.hparams.heads)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(input_ids=batch, labels=batch).loss, prog_bar=True, sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.net(input_ids=batch, labels=batch).loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics["val_loss"]
        self.print(f"step {self.global_step:4d}  val_loss {loss:.3f} nats per byte")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            self.parameters(),
            lr=self.hparams.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=self.hparams.weight_decay,
        )
        scheduler = warmup_cosine(optimizer, self.hparams.warmup_steps, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def byte_llama(hidden_size: int, layers: int, heads: int) -> LlamaForCausalLM:
    """A Llama over bytes with initial weights.

    Args:
        hidden_size: Width of the model.
        layers: Number of decoder layers.
        heads: Number of attention heads.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3 // 8 * 8,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=1024,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config)


def warmup_cosine(optimizer: torch.optim.Optimizer, warmup: int, total: float) -> torch.optim.lr_scheduler.LambdaLR:
    """A learning rate that rises for ``warmup`` updates and falls to a tenth by a cosine, until update ``total``."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def write(model: LlamaForCausalLM, prompt: str, length: int = 300, *, temperature: float = 0.5, seed: int = 0) -> str:
    """Goes on with ``prompt``.

    Args:
        model: A whole model over bytes.
        prompt: The beginning of the text.
        length: Bytes to write.
        temperature: Below 1 the likely bytes become likelier.
        seed: Of the sampling.
    """
    model.eval()
    torch.manual_seed(seed)
    prompt_ids = torch.tensor([list(prompt.encode())], device=model.device)
    ids = model.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        min_new_tokens=length,
        max_new_tokens=length,
        do_sample=True,
        temperature=temperature,
        suppress_tokens=[BOS, EOS],
    )
    return bytes(ids[0].tolist()).decode(errors="replace")
