"""Small modules and data that many tests train; every size is odd somewhere, so that shards need padding."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

WIDTH = 7


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Fixed regression rows."""

    def __init__(self, rows: int, seed: int = 5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(rows, WIDTH, generator=generator)
        self.targets = torch.randn(rows, 3, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def loader(batches: int = 6, batch_size: int = 2, ranks: int = 2) -> DataLoader[Any]:
    """A loader that gives each of ``ranks`` ranks ``batches`` batches."""
    return DataLoader(Rows(batches * batch_size * ranks), batch_size=batch_size, shuffle=False)


def body(twice: bool = False) -> nn.Module:
    """A small network; ``twice`` uses its middle layer two times in one forward."""
    torch.manual_seed(11)
    return Twice() if twice else nn.Sequential(nn.Linear(WIDTH, 13), nn.Tanh(), nn.Linear(13, 3))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, rows: Tensor) -> Tensor:
        hidden: Tensor = self.shared(torch.tanh(self.first(rows)))
        result: Tensor = self.last(torch.tanh(self.shared(torch.tanh(hidden))))
        return result


class Regression(L.LightningModule):
    """Mean squared error with an optimizer and a scheduler that steps on every update.

    Args:
        optimizer: ``sgd`` (with momentum) or ``adamw``.
        scheduler: Whether an exponential scheduler steps on every update.
        born_sharded: Build the network in ``configure_model``.
        twice: Use the middle layer two times.
    """

    def __init__(
        self, optimizer: str = "adamw", *, scheduler: bool = True, born_sharded: bool = True, twice: bool = False
    ) -> None:
        super().__init__()
        self.optimizer_name = optimizer
        self.with_scheduler = scheduler
        self.twice = twice
        self.net: nn.Module | None = None if born_sharded else body(twice)
        self.lrs: list[float] = []
        self.hooks: list[str] = []
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            self.net = body(self.twice)

    def forward(self, rows: Tensor) -> Tensor:
        assert self.net is not None
        result: Tensor = self.net(rows)
        return result

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        rows, targets = batch
        return nn.functional.mse_loss(self(rows).float(), targets.float())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        result: Tensor = self(batch[0])
        return result

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.hooks.append("on_before_optimizer_step")
        self.lrs.append(optimizer.param_groups[0]["lr"])

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.hooks.append("on_before_zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.hooks.append("on_before_backward")

    def on_after_backward(self) -> None:
        self.hooks.append("on_after_backward")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.hooks.append("optimizer_step")
        super().optimizer_step(*args, **kwargs)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.hooks.append("lr_scheduler_step")
        super().lr_scheduler_step(scheduler, metric)

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)
        if not self.with_scheduler:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def trainer(strategy: Any, *, epochs: int = 2, devices: int = 2, **flags: Any) -> L.Trainer:
    """A silent CPU Trainer."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": epochs,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(strategy=strategy, devices=devices, **{**defaults, **flags})


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, gathered from their shards where they are sharded."""
    import deepspeed

    copies = {}
    for name, parameter in module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            copies[name] = parameter.detach().float().clone()
    return copies


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Largest absolute difference between two sets of weights with the same names."""
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)
