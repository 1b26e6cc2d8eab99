"""The folder that DeepSpeed swaps to is looked at before it is used."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero import ConfigError
from lightning_zero.engine.swap_folder import claim_swap_folders, refuse_too_little_room
from tests.harness import ranks

CLAIM = """
import torch.distributed as dist
from lightning_zero.engine.swap_folder import claim_swap_folders
dist.init_process_group("gloo", init_method="file://{0}/store", rank=0, world_size=1)
claim_swap_folders({1!r})
print("claimed", flush=True)
input()
"""


def config(folder: Path, stage: int = 3, section: str = "offload_optimizer") -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, section: {"device": "nvme", "nvme_path": str(folder)}}}


def join() -> None:
    torch.distributed.init_process_group("gloo")


@ranks(2)
def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    """R2: a path under a file and a drive without room are refused on all ranks; below stage 3 nothing is looked at."""
    join()
    rank = int(os.environ["RANK"])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"rank 0: nvme_path='.*/file/swap' cannot be written to.*another folder"):
        claim_swap_folders(config(tmp_path / "file" / "swap", section="offload_param"))
    claim_swap_folders(config(tmp_path / "file" / "swap", stage=2))
    alone = config(tmp_path / "file" / "swap" if rank == 1 else tmp_path)
    with pytest.raises(ConfigError, match="rank 1: nvme_path"):
        claim_swap_folders(alone)
    claim_swap_folders(config(tmp_path))
    claim_swap_folders(config(tmp_path))  # the next fit of this process
    with torch.device("meta"):
        huge = nn.ModuleList([nn.Linear(2**20, 2**20) for _ in range(64)])
    refuse_too_little_room(nn.Linear(3, 3), config(tmp_path))
    with pytest.raises(ConfigError, match=r"has [\d.]+ GB left, .* 70,368,811,286,528 parameters need 844425\.7 GB"):
        refuse_too_little_room(huge, config(tmp_path))


def test_two_runs_need_two_folders(tmp_path: Path) -> None:
    """A second run on a host is refused while the first swaps to the folder, and not after the first was killed."""

    def start(name: str) -> subprocess.Popen[str]:
        place = tmp_path / name
        place.mkdir()
        program = CLAIM.format(place, config(tmp_path / "swap"))
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    first = start("first")
    assert first.stdout is not None
    assert first.stdout.readline() == "claimed\n"
    _, told = start("second").communicate(timeout=60)
    assert "is in use by another run on this host" in told.splitlines()[-1]
    first.kill()
    first.communicate()
    out, _ = start("third").communicate("\n", timeout=60)
    assert out == "claimed\n"
