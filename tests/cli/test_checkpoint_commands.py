"""`lightning-zero inspect | verify | consolidate`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lightning_zero.checkpoint.consolidate import load_full_state_dict
from lightning_zero.cli.main import main
from tests.harness.forkserver import REPOSITORY

FIXTURES = Path(__file__).parents[1] / "data" / "checkpoints"
STAGE3 = FIXTURES / "deepspeed-stage3-bf16"
Captured = pytest.CaptureFixture[str]


def test_inspect(capsys: Captured) -> None:
    """The facts, the files and, when asked for, every tensor with its role."""
    assert main(["inspect", str(STAGE3), "--tensors"]) == 0
    text = capsys.readouterr().out
    for words in ("stage, ranks", "3, 2", "global_step3", "zero_pp_rank_1_mp_rank_00_model_states.pt"):
        assert words in text
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert lines["embed.weight"] == ["11x5", "float32", "trainable"]
    assert lines["head.weight"] == ["11x5", "float32", "trainable,", "tied", "to", "embed.weight"]
    assert lines["middle.bias"] == ["7", "bfloat16", "frozen"]


def test_verify(capsys: Captured, tmp_path: Path) -> None:
    """Exit 0 for a whole checkpoint, 1 with the reason for a damaged one, 2 for a path that is none."""
    assert main(["verify", str(STAGE3), "--deep"]) == 0
    assert "whole" in capsys.readouterr().out
    shutil.copytree(STAGE3, tmp_path / "copy")
    (tmp_path / "copy" / "global_step3" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    assert main(["verify", str(tmp_path / "copy")]) == 1
    assert "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt is missing" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "kopy")]) == 2
    assert f"Near it: {tmp_path / 'copy'}" in capsys.readouterr().err


def test_consolidate(capsys: Captured, tmp_path: Path) -> None:
    """The folder holds the weights in the dtype asked for; away from a terminal progress comes as lines."""
    arguments = ["consolidate", str(STAGE3), str(tmp_path / "out"), "--format", "safetensors", "--dtype", "bfloat16"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"wrote {tmp_path / 'out'}"
    assert lines[-2].startswith("consolidating: 100 %")
    written = load_file(tmp_path / "out" / "model.safetensors")
    whole = load_full_state_dict(STAGE3, dtype="bfloat16")
    assert all(written[name].equal(whole[name]) for name in written)


def test_a_refusal_is_one_message(tmp_path: Path) -> None:
    """As a program: exit code 2, the message and its remedy on standard error, no traceback."""
    command = [sys.executable, "-m", "lightning_zero", "consolidate", STAGE3, tmp_path / "out"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    message = ended.stderr.strip().splitlines()[-1]
    assert message.startswith("lightning-zero consolidate: ")
    assert "use format='safetensors'" in message
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments", [["consolidate", "a"], ["inspect"], ["consolidate", "a", "b", "--dtype", "int8"], ["rename"]]
)
def test_wrong_words_end_with_2(capsys: Captured, arguments: list[str]) -> None:
    """A missing or unknown word is answered with the usage and exit code 2."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: lightning-zero" in capsys.readouterr().err
