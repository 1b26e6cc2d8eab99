"""What each test of this folder starts in a process of its own: fit, test, fit, save, and a report of what was seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonargparse
import lightning as L
import torch
from torch import Tensor

import lightning_zero  # noqa: F401  # registers the strategy names
from examples.lm import ByteLlama, PythonTopics, write


def main(
    strategy: str, folder: Path, accelerator: str = "cuda", precision: str = "bf16-mixed", steps: int = 40
) -> None:
    """Trains twice, tests in between, saves, and leaves ``report.json``.

    Args:
        strategy: A registered name.
        folder: Where report and checkpoint go.
        accelerator: ``cuda``, or ``cpu`` to try the job itself.
        precision: Of both runs.
        steps: Updates in each run.
    """
    L.seed_everything(1, verbose=False)
    large = {"hidden_size": 512, "layers": 8, "heads": 8} if accelerator == "cuda" else {"hidden_size": 64, "layers": 1}
    model, data = ByteLlama(**large, learning_rate=1e-3), PythonTopics(batch_size=16)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=accelerator,
        devices=1,
        precision=precision,
        max_epochs=1,
        limit_train_batches=steps,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    (before,) = trainer.validate(model, data)
    trainer.fit(model, data)
    first = trainer.callback_metrics["val_loss"].item()
    (test,) = trainer.test(model, data)
    after_first = where(model)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, data)
    second = trainer.callback_metrics["val_loss"].item()
    trainer.save_checkpoint(folder / "saved.ckpt")
    report = {
        "val_loss": [before["val_loss"], first, second],
        "test_loss": test["test_loss"],
        "updates": trainer.global_step,
        "device": trainer.strategy.root_device.type,
        "where": [after_first, where(model)],
        "text": write(model.net, "The", 20),
    }
    (folder / "report.json").write_text(json.dumps(report))


def where(model: torch.nn.Module) -> dict[str, list[str]]:
    """Devices of the parameters outside a forward (at stage 3: of their shards), and of the buffers."""

    def held(parameter: Any) -> Tensor:
        shard: Tensor = getattr(parameter, "ds_tensor", parameter)
        return shard

    return {
        "parameters": sorted({held(parameter).device.type for parameter in model.parameters()}),
        "buffers": sorted({buffer.device.type for buffer in model.buffers()}),
    }


if __name__ == "__main__":
    jsonargparse.auto_cli(main)
