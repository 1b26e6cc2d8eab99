"""The Fabric example, much shortened, under each launcher."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.test_launchers import LAUNCHED_BY, free_port
from tests.harness.forkserver import RANK_ENVIRONMENT, REPOSITORY

SCRIPT = str(REPOSITORY / "examples" / "fabric_lm.py")
SCRIPTS = Path(sys.executable).parent
PROMPT = 'The "for" statement'
SAMPLE = 20


def command(launcher: str) -> list[str]:
    if launcher == "python":
        return [sys.executable, SCRIPT]
    if launcher == "torchrun":
        return [str(SCRIPTS / "torchrun"), "--nproc_per_node", "2", "--master_port", str(free_port()), SCRIPT]
    address = ["--accelerator", "cpu", "--devices", "2", "--main-port", str(free_port())]
    return [str(SCRIPTS / "fabric"), "run", *address, SCRIPT]


@pytest.mark.parametrize("launcher", ["python", "torchrun", "fabric run"])
def test_fabric_lm(launcher: str, tmp_path: Path) -> None:
    """Two processes lower the validation loss, keep the best shards, export them, and the exported model writes."""
    small = ["--hidden_size", "64", "--layers", "1", "--epochs", "2", "--steps", "4", "--accumulate", "2"]
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED_BY}
    done = subprocess.run(
        [*command(launcher), *small, "--sample", str(SAMPLE), "--folder", str(tmp_path)],
        env=environment | RANK_ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    losses = {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  val_loss ([\d.]+)", done.stdout)}
    assert list(losses) == [4, 8]
    assert losses[8] < losses[4] < 5.6, "5.55 nats per byte is what a model that knows nothing has"
    sample = done.stdout[done.stdout.index(PROMPT) :].removesuffix("\n")
    assert len(sample.encode()) >= len(PROMPT) + SAMPLE  # a byte that is no UTF-8 is shown by three
    assert {path.name for path in (tmp_path / "best-model").iterdir()} >= {"config.json", "model.safetensors"}
    ranks = {re.search(r"rank_(\d)", path.name)[1] for path in tmp_path.glob("best.ckpt/*/*_optim_states.pt")}
    assert ranks == {"0", "1"}
