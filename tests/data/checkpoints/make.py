"""Makes the checkpoints in this folder: tiny ones, written by DeepSpeed alone and by Lightning's own strategy.

    python -m tests.data.checkpoints.make

Each is two ranks' work and lies beside ``<name>.expected.pt``, the whole fp32 weights as the live engine held them. The
recovery scripts that DeepSpeed copies into a checkpoint are deleted again.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.checkpoint.runs import Case, save_runs
from tests.harness import run_ranks

HERE = Path(__file__).parent
DEEPSPEED = [Case("everything", 1, "fp32"), Case("everything", 2, "bf16"), Case("everything", 3, "bf16")]


class Remember(L.Callback):
    """A callback with a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"best": torch.tensor(0.25), "seen": 8}


class Tiny(L.LightningModule):
    """Two layers and a buffer."""

    def __init__(self, width: int = 5, options: object = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, 3))
        self.register_buffer("seen", torch.tensor(4))

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.net(batch).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


class Options:
    """A hyper-parameter of a class that a reader need not have."""

    depth = 3


def train_with_lightning(folder: Path, stage: int) -> None:
    """One rank of a run with Lightning's own strategy, whose refusal of CPUs is passed by."""
    import deepspeed
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
    from lightning.pytorch.strategies import deepspeed as module

    initialize = deepspeed.initialize
    deepspeed.initialize = lambda *args, **kwargs: initialize(*args, **{**kwargs, "args": None})
    module._validate_device_index_selection = lambda *_: None

    def setup_environment(self: DeepSpeedStrategy) -> None:
        super(DDPStrategy, self).setup_environment()
        self.setup_distributed()

    DeepSpeedStrategy.setup_environment = setup_environment  # type: ignore[method-assign]
    config = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    trainer = L.Trainer(
        strategy=DeepSpeedStrategy(config=config, process_group_backend="gloo"),
        accelerator="cpu",
        devices=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 2,
        plugins=[LightningEnvironment()],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Remember()],
    )
    torch.manual_seed(1)
    tiny = Tiny(5, Options())
    trainer.fit(tiny, DataLoader(torch.randn(16, 5), batch_size=2))
    expected = {
        name: deepspeed.utils.safe_get_full_fp32_param(value).clone() for name, value in tiny.named_parameters()
    }
    trainer.save_checkpoint(folder)
    if trainer.is_global_zero:
        torch.save(expected | {"seen": tiny.seen.clone()}, f"{folder.with_suffix('')}.expected.pt")


def main() -> None:
    """Make them all anew."""
    for path in HERE.iterdir():
        if path.is_dir() and path.name != "__pycache__":
            shutil.rmtree(path)
    with tempfile.TemporaryDirectory() as scratch:
        run_ranks(save_runs, 2, Path(scratch), DEEPSPEED)
        for case in DEEPSPEED:
            target = HERE / f"deepspeed-stage{case.stage}-{case.precision}"
            shutil.copytree(Path(scratch) / str(case), target)
            live = torch.load(Path(scratch) / f"{case}.pt", weights_only=True)
            torch.save(live["expected"], f"{target}.expected.pt")
    for stage in (2, 3):
        run_ranks(train_with_lightning, 2, HERE / f"lightning-stage{stage}.ckpt", stage)
    for script in HERE.glob("*/zero_to_*.py"):
        script.unlink()


if __name__ == "__main__":
    from tests.data.checkpoints import make  # so that what is pickled has the module's name, not __main__

    make.main()
