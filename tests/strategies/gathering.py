"""A module that has what has gone wrong somewhere when whole weights are gathered, with weights that are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.checkpoint.runs import VARIANTS, Net


class Everything(L.LightningModule):
    """Tied and aliased weights, a frozen layer in the middle, two groups of odd sizes, buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(3)
            self.net = Net(VARIANTS["everything"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.net is not None
        loss: Tensor = self.net(batch).float().pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        plain = [p for name, p in trained if name.endswith(("bias", "scale"))]
        decayed = [p for name, p in trained if not name.endswith(("bias", "scale"))]
        return torch.optim.AdamW([{"params": plain, "weight_decay": 0.0}, {"params": decayed}], lr=0.01)


def tokens(ranks: int) -> DataLoader[Any]:
    """Two batches for each rank."""
    return DataLoader(torch.arange(8 * ranks) % 11, batch_size=4)  # type: ignore[arg-type]  # a tensor has rows


def known_weights(path: Path) -> dict[str, Tensor]:
    """Writes a state dict for :class:`Everything` whose fp32 values no 16-bit type can hold."""
    module = Everything()
    module.configure_model()
    generator = torch.Generator().manual_seed(9)
    values = {}
    for name, value in module.state_dict().items():
        drawn = torch.rand(value.shape, generator=generator) + 0.5
        values[name] = drawn if value.is_floating_point() else value
    for name in list(values):
        if name.startswith("net.again."):
            values[name] = values[name.replace("again", "block")]
    values["net.head.weight"] = values["net.embed.weight"]
    torch.save(values, path)
    return values


def read_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of a folder by name, and the other names in its files' metadata."""
    tensors, others = {}, {}
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with safe_open(path, framework="pt") as content:
            tensors.update({name: content.get_tensor(name) for name in content.keys()})  # noqa: SIM118
            others.update({key: name for key, name in content.metadata().items() if key != "format"})
    if len(files) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert sorted(index["weight_map"]) == sorted(tensors)
    return tensors, others


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its relative name."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
