"""The same script under every launcher: unique ranks, two processes, and training."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.forkserver import RANK_ENVIRONMENT, REPOSITORY

SCRIPT = str(REPOSITORY / "tests" / "distributed" / "launched.py")
LAUNCHED_BY = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_SIZE")
SCRIPTS = Path(sys.executable).parent


def start(*command: str) -> None:
    """Runs a launcher to its end and shows what it printed when it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED_BY}
    environment |= RANK_ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


def reports(folder: Path) -> list[dict[str, Any]]:
    """What the ranks wrote, in the order of their ranks."""
    return sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda report: report["rank"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def assert_trained(folder: Path, environment: str) -> None:
    """Both ranks took part in the same run and saw different data."""
    first, second = reports(folder)
    assert (first["rank"], second["rank"]) == (first["local_rank"], second["local_rank"]) == (0, 1)
    assert first["world_size"] == second["world_size"] == 2
    assert first["environment"] == second["environment"] == environment
    assert first["updates"] == second["updates"] == 6
    assert len(first["losses"]) == len(second["losses"]) == 6
    assert first["losses"] != second["losses"]


def test_plain_python(tmp_path: Path) -> None:
    """Under plain python, Lightning starts the second process."""
    start(sys.executable, SCRIPT, str(tmp_path))
    assert_trained(tmp_path, "LightningEnvironment")


def test_torchrun(tmp_path: Path) -> None:
    """Under torchrun, the ranks are torchrun's."""
    torchrun = str(SCRIPTS / "torchrun")
    start(torchrun, "--nproc_per_node", "2", "--master_port", str(free_port()), SCRIPT, str(tmp_path))
    assert_trained(tmp_path, "TorchElasticEnvironment")


def test_deepspeed(tmp_path: Path) -> None:
    """Under the deepspeed launcher, its variables are recognised without a plugin."""
    deepspeed = [sys.executable, str(SCRIPTS / "deepspeed")]
    numbers = ["--num_gpus", "2", "--master_port", str(free_port())]
    start(*deepspeed, *numbers, "--no_local_rank", SCRIPT, str(tmp_path))
    assert_trained(tmp_path, "DeepSpeedEnvironment")


def test_accelerate(tmp_path: Path) -> None:
    """Accelerate starts one process for a CPU run, and Lightning the second."""
    accelerate = [str(SCRIPTS / "accelerate"), "launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
    numbers = ["--main_process_port", str(free_port()), "--mixed_precision", "no", "--dynamo_backend", "no"]
    start(*accelerate, *numbers, SCRIPT, str(tmp_path))
    assert_trained(tmp_path, "LightningEnvironment")


def test_a_failing_rank_fails_the_launcher(tmp_path: Path) -> None:
    """`start` reports a script that fails, so that the tests above can fail."""
    with pytest.raises(AssertionError, match="No such file or directory"):
        start(sys.executable, SCRIPT, str(tmp_path / "missing"))
