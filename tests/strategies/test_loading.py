"""A LightningModule from any checkpoint, in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import CheckpointError, ZeroStrategy, load_from_checkpoint
from tests.harness import run_ranks
from tests.models import Regression, largest_difference, loader, trainer, whole_weights


class Sized(Regression):
    """Its width and its dropout come as arguments, and its network is built in ``configure_model``."""

    def __init__(self, width: int, dropout: float = 0.5, note: Any = None) -> None:
        super().__init__("adamw")
        self.save_hyperparameters()

    def configure_model(self) -> None:
        if self.net is None:
            size, dropout = self.hparams["width"], self.hparams["dropout"]
            self.net = nn.Sequential(nn.Linear(7, size), nn.BatchNorm1d(size), nn.Dropout(dropout), nn.Linear(size, 3))
            self.net.register_buffer("steps", torch.tensor(0))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = sorted(checkpoint["state_dict"])


class Note:
    """A hyper-parameter of a class of the user's."""

    def __init__(self, text: str) -> None:
        self.text = text


def trained(folder: Path, stage: Any, note: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Saves a sharded checkpoint and a file of weights; returns the parameters and the buffers."""
    module = Sized(11, dropout=0.25, note=note)
    runner = trainer(ZeroStrategy(stage=stage), epochs=1)
    runner.fit(module, loader())
    runner.save_checkpoint(folder / "run.ckpt")
    runner.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    return whole_weights(module), {name: buffer.clone() for name, buffer in module.named_buffers()}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_folder_and_file(stage: int, tmp_path: Path) -> None:
    """C3, C4: from a sharded folder, its tag folder and a file: saved arguments, given ones first, weights, buffers."""
    weights, buffers = run_ranks(trained, 2, tmp_path, stage, "plain")[0]
    for path in (tmp_path / "run.ckpt", tmp_path / "run.ckpt" / "checkpoint", tmp_path / "weights.ckpt"):
        module = load_from_checkpoint(Sized, path, dropout=0.75)
        assert type(module) is Sized
        assert dict(module.hparams) == {"width": 11, "dropout": 0.75, "note": "plain"}
        assert module.net is not None and module.net[2].p == 0.75
        assert largest_difference(dict(module.named_parameters()), weights) == 0  # type: ignore[arg-type]
        for name, buffer in module.named_buffers():
            assert torch.equal(buffer, buffers[name]) and buffer.dtype == buffers[name].dtype, name
        assert module.seen == sorted(module.state_dict())
        assert not any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def test_what_does_not_fit_and_what_is_not_trusted(tmp_path: Path) -> None:
    """Strictness is the caller's, and a class of the user's is read only when that is asked for."""
    weights, _ = run_ranks(trained, 2, tmp_path, 3, Note("mine"))[0]
    path = tmp_path / "run.ckpt"
    with pytest.raises(CheckpointError, match=r"hyper_parameters\.note .*weights_only=False"):
        load_from_checkpoint(Sized, path)
    module = load_from_checkpoint(Sized, path, weights_only=False)
    assert module.hparams["note"].text == "mine"
    assert largest_difference(dict(module.named_parameters()), weights) == 0  # type: ignore[arg-type]

    class Longer(Sized):
        def configure_model(self) -> None:
            super().configure_model()
            self.head = nn.Linear(3, 1)

    with pytest.raises(RuntimeError, match=r"Missing key.*head\.weight"):
        load_from_checkpoint(Longer, path, weights_only=False)
    with pytest.warns(UserWarning, match=r"not in the checkpoint.*head\.weight"):
        longer = load_from_checkpoint(Longer, path, strict=False, weights_only=False, map_location="cpu")
    assert torch.equal(longer.net[0].weight, module.net[0].weight)  # type: ignore[index]
    with pytest.raises(CheckpointError, match=r"does not exist.*run\.ckpt"):
        load_from_checkpoint(Sized, tmp_path / "runn.ckpt")
