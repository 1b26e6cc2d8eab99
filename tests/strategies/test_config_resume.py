"""A resume goes on with the batch after the last one, whatever the config had to ask of the loaders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_zero import ZeroStrategy
from tests.harness import ranks
from tests.models import WIDTH, Regression, trainer

BATCHES = 6
ASKS = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": "auto", "warmup_num_steps": 2, "warmup_max_lr": 0.01},
    },
}


class StatefulLoader:
    """Numbered batches that remember their place between runs, in the way of stateful loaders.

    A state that is loaded counts for the next iteration, wherever an earlier one has got to.
    """

    batch_size = 2

    def __init__(self) -> None:
        self.next = 0
        self.resume_at: int | None = None

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        self.next, self.resume_at = self.resume_at or 0, None
        while self.next < BATCHES:
            number = self.next
            self.next += 1
            yield torch.full((self.batch_size, WIDTH), float(number)), torch.zeros(self.batch_size, 3)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resume_at = state["next"]


class Seeing(Regression):
    """Notes the number of every batch that it trains on."""

    def __init__(self, *, from_config: bool = True) -> None:
        super().__init__("adamw")
        self.from_config = from_config
        self.seen: list[int] = []

    def configure_optimizers(self) -> Any:
        return None if self.from_config else super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(int(batch[0][0, 0]))
        return super().training_step(batch, batch_idx)


class FromHook(Seeing):
    """Makes its stateful loader in the module's hook."""

    def train_dataloader(self) -> Any:
        return StatefulLoader()


class Plain:
    """Batches from a first number to the last, without a state."""

    batch_size = 2

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return BATCHES - self.first

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.first, BATCHES):
            yield torch.full((2, WIDTH), float(number)), torch.zeros(2, 3)


class Counted(L.LightningDataModule):
    """Keeps the count of batches itself, and makes its loader from it."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0

    def train_dataloader(self) -> Any:
        return Plain(self.done)

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.trainer.global_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


def run(
    strategy: Any, module: Seeing, ckpt_path: Path | None = None, *, folder: str = "saved", **data: Any
) -> L.Trainer:
    """Fits for two epochs; without ``ckpt_path`` a checkpoint is saved after every update."""
    flags = {name: data.pop(name) for name in ("devices", "max_steps") if name in data}
    if ckpt_path is None:
        saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        flags |= {"enable_checkpointing": True, "callbacks": [saver]}
    runner = trainer(strategy, **flags)
    runner.fit(module, ckpt_path=ckpt_path, **data)
    return runner


@ranks(2)
def test_stateful_loaders_go_on_where_they_stopped() -> None:
    """C21: a resume after 3 of 6 batches trains on 3, 4, 5 and then a whole epoch; also with total_num_steps "auto"."""
    saved = Path("saved/step=3.ckpt")
    rest = [3, 4, 5, *range(BATCHES)]
    run(ZeroStrategy(stage=2, config=ASKS), Seeing(), max_steps=4, train_dataloaders=StatefulLoader())

    given = Seeing()
    runner = run(ZeroStrategy(stage=2, config=ASKS), given, saved, train_dataloaders=StatefulLoader())
    assert given.seen == rest
    assert runner.global_step == 2 * BATCHES
    total = runner.strategy.resolved.config["scheduler"]["params"]["total_num_steps"]
    assert total == 2 * BATCHES

    hook = FromHook()
    assert run(ZeroStrategy(stage=2, config=ASKS), hook, saved).global_step == 2 * BATCHES
    assert hook.seen == rest


@ranks(2)
def test_a_hook_sees_what_the_checkpoint_restored() -> None:
    """C21: a datamodule that makes its loader from its own restored count makes it from the right one, as under ddp."""
    seen = {}
    for name in ("ddp", "zero1"):
        run(name, Seeing(from_config=False), max_steps=4, folder=name, datamodule=Counted())
        again = Seeing(from_config=False)
        run(name, again, Path(name, "step=3.ckpt"), datamodule=Counted())
        seen[name] = again.seen
    assert seen["zero1"] == seen["ddp"]
    assert seen["zero1"][:3] == [3, 4, 5]


@ranks(1)
def test_a_first_fit_makes_its_loaders_once() -> None:
    """A fit without a checkpoint calls the loader hook once, although the config asks for batch size and length."""
    calls = []

    class Once(FromHook):
        def train_dataloader(self) -> Any:
            calls.append(1)
            return super().train_dataloader()

    module = Once()
    run(ZeroStrategy(stage=0, config=ASKS), module, devices=1)
    assert module.seen == [*range(BATCHES), *range(BATCHES)]
    assert len(calls) == 1
