"""The example's Llama on one CUDA device: fit, test on the same engine, fit on a fresh one, save."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.forkserver import REPOSITORY

pytestmark = pytest.mark.gpu

# `cpu` tries the job and these assertions on a machine without a GPU; it says nothing about CUDA.
ACCELERATOR = os.environ.get("LIGHTNING_ZERO_GPU_TESTS_ON", "cuda")
STEPS, PRECISION = (40, "bf16-mixed") if ACCELERATOR == "cuda" else (8, "32-true")


@pytest.mark.parametrize(
    ("strategy", "parameters_on"), [("zero2", ACCELERATOR), ("zero3", ACCELERATOR), ("zero3_offload", "cpu")]
)
def test_fit_test_fit_save(strategy: str, parameters_on: str, tmp_path: Path) -> None:
    """The engine trains, is tested after fit where it stands, gives way to a second fit, and is saved."""
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    options = ["--accelerator", ACCELERATOR, "--precision", PRECISION, "--steps", str(STEPS)]
    command = [sys.executable, "-m", "tests.gpu.job", strategy, str(tmp_path), *options]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    report = json.loads((tmp_path / "report.json").read_text())

    before, first, second = report["val_loss"]
    assert second < first < before
    assert report["test_loss"] == pytest.approx(first, rel=1e-3)  # the same weights on the same text
    assert report["updates"] == 2 * STEPS
    assert report["device"] == ACCELERATOR
    for place in report["where"]:
        assert place == {"parameters": [parameters_on], "buffers": [ACCELERATOR]}
    assert report["text"].startswith("The")
    assert len(report["text"].encode()) >= 23

    saved = tmp_path / "saved.ckpt"
    tag = saved / (saved / "latest").read_text().strip()
    assert any("optim_states" in path.name for path in tag.iterdir())
