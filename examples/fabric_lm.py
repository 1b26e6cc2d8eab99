"""Trains the Llama of train_lm.py in a loop of its own, with Fabric and DeepSpeed ZeRO.

    python examples/fabric_lm.py --help
    torchrun --nproc_per_node 2 examples/fabric_lm.py
    fabric run --devices 2 examples/fabric_lm.py

Under plain python, Fabric starts the processes: two, on two GPUs or on a CPU. `fabric run` gets no `--strategy` of its
own, since it knows its choices before this script registers the names; behind the script's name, it is the script's.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any, Literal

import jsonargparse
import torch
from lightning.fabric import Fabric
from lm import PythonTopics, byte_llama, warmup_cosine, write
from transformers import AutoModelForCausalLM

import lightning_zero  # noqa: F401  # registers the strategy names

PROMPT = 'The "for" statement'


@torch.no_grad()
def validate(fabric: Fabric, model: Any, batches: Any) -> float:
    """Mean loss over the validation batches of all processes, in nats per byte."""
    model.eval()
    losses = [model(input_ids=batch, labels=batch).loss for batch in batches]
    model.train()
    return float(fabric.all_reduce(torch.stack(losses).mean()))


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
    folder: Path = Path("runs/fabric_lm"),
) -> None:
    """Train a byte-level Llama on Python's help topics, export its best weights, and let them write.

    Args:
        strategy: A registered name: zero1, zero2, zero3, each also with _offload, or zero3_nvme.
        accelerator: cpu, cuda, or auto.
        devices: Number of processes; on GPUs, one each.
        precision: bf16-mixed suits GPUs; a CPU without bf16 instructions is many times slower with it.
        epochs: Number of epochs; a validation ends each, and a checkpoint when it was the best.
        steps: Updates in one epoch.
        accumulate: Micro-batches in one update.
        batch_size: Samples of 128 bytes in one process's micro-batch.
        hidden_size: Width of the model, a multiple of 64.
        layers: Number of decoder layers.
        sample: Bytes of text to write at the end.
        folder: Where the best checkpoint is kept, and its 16-bit weights in a folder for ``from_pretrained``.
    """
    launched = "LT_CLI_USED" in os.environ  # by `fabric run`, whose --devices holds
    fabric = Fabric(
        strategy=strategy, accelerator=accelerator, devices="auto" if launched else devices, precision=precision
    )
    if not launched:
        fabric.launch()
    fabric.seed_everything(1, verbose=False)

    data = PythonTopics(batch_size=batch_size)
    with fabric.init_module():  # at stage 3 the parameters are sharded at birth
        network = byte_llama(hidden_size, layers, heads=hidden_size // 64)
    adamw = torch.optim.AdamW(network.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = warmup_cosine(adamw, warmup=20, total=epochs * steps)
    model, optimizer = fabric.setup(network, adamw)
    train_batches, val_batches = fabric.setup_dataloaders(data.train_dataloader(), data.val_dataloader())
    endless = itertools.chain.from_iterable(itertools.repeat(train_batches))  # shuffled anew each time

    state = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "epoch": 0}
    best, best_path = float("inf"), folder / "best.ckpt"
    started = time.monotonic()
    for state["epoch"] in range(1, epochs + 1):
        for _ in range(steps):
            for micro_batch in range(1, accumulate + 1):
                batch = next(endless)
                with fabric.no_backward_sync(model, enabled=micro_batch < accumulate):
                    fabric.backward(model(input_ids=batch, labels=batch).loss / accumulate)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        loss = validate(fabric, model, val_batches)
        fabric.print(f"step {state['epoch'] * steps:4d}  val_loss {loss:.3f} nats per byte")
        if loss < best:
            best = loss
            fabric.save(best_path, state)
    fabric.print(f"\n{epochs * steps} updates took {time.monotonic() - started:.0f} s")

    fabric.load(best_path, state)
    fabric.strategy.save_gathered_weights(folder / "best-model", dtype="auto")
    fabric.print(f"best checkpoint: {best_path}\nits 16-bit weights: {folder / 'best-model'}")
    if fabric.is_global_zero:
        exported = AutoModelForCausalLM.from_pretrained(folder / "best-model")
        print(f"sample:\n\n{write(exported, PROMPT, sample)}")


if __name__ == "__main__":
    jsonargparse.auto_cli(main)
