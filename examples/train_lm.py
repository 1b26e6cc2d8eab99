"""Trains a small Llama on Python's help topics with DeepSpeed ZeRO, from one word: ``strategy="zero3_offload"``.

    python examples/train_lm.py --help

Lightning starts the processes: two, on two GPUs or on a CPU.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import jsonargparse
import lightning as L
from lm import ByteLlama, PythonTopics, write
from transformers import AutoModelForCausalLM

from lightning_zero import BestModelCheckpoint, GatheredWeightsCheckpoint  # the import registers the strategy names

PROMPT = 'The "for" statement'


def main(
    strategy: str = "zero3_offload",
    accelerator: str = "auto",
    devices: int = 2,
    precision: Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"] = "32-true",
    epochs: int = 5,
    steps: int = 50,
    accumulate: int = 1,
    batch_size: int = 8,
    hidden_size: int = 256,
    layers: int = 4,
    sample: int = 300,
    folder: Path = Path("runs/train_lm"),
) -> None:
    """Train a byte-level Llama on Python's help topics, export its best weights, and let them write.

    Args:
        strategy: A registered name: zero1, zero2, zero3, each also with _offload, or zero3_nvme.
        accelerator: cpu, cuda, or auto.
        devices: Number of processes; on GPUs, one each.
        precision: bf16-mixed suits GPUs; a CPU without bf16 instructions is many times slower with it.
        epochs: Number of epochs; a validation and a checkpoint end each.
        steps: Updates in one epoch.
        accumulate: Micro-batches in one update.
        batch_size: Samples of 128 bytes in one process's micro-batch.
        hidden_size: Width of the model, a multiple of 64.
        layers: Number of decoder layers.
        sample: Bytes of text to write at the end.
        folder: Where the best checkpoint is kept, and its 16-bit weights in a folder for ``from_pretrained``.
    """
    L.seed_everything(1, verbose=False)
    data = PythonTopics(batch_size=batch_size)
    model = ByteLlama(hidden_size=hidden_size, layers=layers, heads=hidden_size // 64)
    best = BestModelCheckpoint(folder, filename="{step}-{val_loss:.2f}", monitor="val_loss")
    export = GatheredWeightsCheckpoint(folder / "best-model", which="best")
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=accelerator,
        devices=devices,
        precision=precision,
        max_epochs=epochs,
        limit_train_batches=steps * accumulate,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        callbacks=[best, export],
        logger=False,
    )
    started = time.monotonic()
    trainer.fit(model, data)
    trainer.print(f"\n{trainer.global_step} updates took {time.monotonic() - started:.0f} s")
    trainer.print(f"best checkpoint: {best.best_model_path}\nits 16-bit weights: {export.dirpath}")
    if trainer.is_global_zero:
        exported = AutoModelForCausalLM.from_pretrained(export.dirpath)
        print(f"sample:\n\n{write(exported, PROMPT, sample)}")


if __name__ == "__main__":
    jsonargparse.auto_cli(main)
