"""Consolidation takes little memory, whatever the model's size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.forkserver import REPOSITORY

PROGRAM = """
import sys, threading, time
from pathlib import Path
from lightning_zero.checkpoint.consolidate import consolidate

def anonymous():
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) // 1024

before = peak = anonymous()
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
consolidate(sys.argv[1], sys.argv[2], format=sys.argv[3], dtype=sys.argv[4])
print(peak - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks' stage-3 shards, laid out as DeepSpeed does, of one 240 MB and several smaller parameters."""
    shapes = {"big": torch.Size([6000, 10_001]), **{f"w{index}": torch.Size([1000, 1001]) for index in range(20)}}
    root = tmp_path_factory.mktemp("large")
    folder = root / "step"
    folder.mkdir()
    share = sum(-(-shape.numel() // 2) for shape in shapes.values())
    for rank in (0, 1):
        module = {name: torch.empty(0) for name in shapes}
        state: dict[str, Any] = {"module": module, "param_shapes": [shapes], "buffer_names": [], "dp_world_size": 2}
        torch.save(state | {"shared_params": {}}, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        optimizer = {"zero_stage": 3, "partition_count": 2, "fp32_flat_groups": [torch.randn(share)]}
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, path)
    return root


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format_", ["safetensors", "torch"])
def test_memory_does_not_grow_with_the_model(large: Path, tmp_path: Path, format_: str, dtype: str) -> None:
    """W6: anonymous memory stays below 120 MB while 320 MB are converted, one parameter of 240 MB among them."""
    command = [sys.executable, "-c", PROGRAM, large, tmp_path / "out", format_, dtype]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    used = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert int(used.stdout) < 120
