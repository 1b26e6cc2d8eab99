"""The example that `make train` runs, much shortened."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.harness.forkserver import RANK_ENVIRONMENT, REPOSITORY

PROMPT = 'The "for" statement'
SAMPLE = 40


def test_train_lm(tmp_path: Path) -> None:
    """Two processes lower the validation loss, keep the best shards, export them, and the exported model writes."""
    small = ["--hidden_size", "64", "--layers", "1", "--epochs", "2", "--steps", "8", "--sample", str(SAMPLE)]
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / "train_lm.py"), *small, "--folder", str(tmp_path / "run")],
        env=os.environ | RANK_ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]

    losses = {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  val_loss ([\d.]+)", done.stdout)}
    assert list(losses) == [0, 8, 16]
    assert losses[16] < losses[8] < losses[0]

    sample = done.stdout[done.stdout.index(PROMPT) :].removesuffix("\n")
    assert len(sample.encode()) >= len(PROMPT) + SAMPLE  # a byte that is no UTF-8 is shown by three

    checkpoint, exported = sorted((tmp_path / "run").iterdir(), key=lambda path: path.suffix != ".ckpt")
    assert checkpoint.name.startswith("step=16-val_loss=")
    assert {path.name for path in exported.iterdir()} >= {"config.json", "generation_config.json", "model.safetensors"}
    ranks = {re.search(r"rank_(\d)", path.name)[1] for path in checkpoint.glob("*/*zero_pp_rank_*_optim_states.pt")}
    assert ranks == {"0", "1"}
