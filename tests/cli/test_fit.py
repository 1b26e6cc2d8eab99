"""`lightning-zero fit` with the files of `configs/`, by the commands of the README, on two processes of a CPU."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_zero import ZeroCLI, ZeroStrategy
from lightning_zero.cli.main import main
from tests.harness.forkserver import RANK_ENVIRONMENT, REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
COMMANDS = {
    Path(path).stem: line for line, path in re.findall(r"^(lightning-zero fit --config (configs/\S+).*)$", README, re.M)
}
SHORT = [
    *("--trainer.accelerator", "cpu", "--trainer.max_steps", "2", "--trainer.log_every_n_steps", "1"),
    *("--trainer.limit_val_batches", "1", "--trainer.num_sanity_val_steps", "0", "--trainer.max_epochs", "1"),
    *("--model.hidden_size", "128", "--model.layers", "1", "--model.heads", "2"),
]


def start(
    words: list[str], folder: Path, program: Sequence[str] = ("lightning_zero",), **more: str
) -> subprocess.CompletedProcess[str]:
    """Runs the program in a folder from which the repository's `configs` and `examples` are seen."""
    for name in ("configs", "examples"):
        (folder / name).symlink_to(REPOSITORY / name)
    environment = os.environ | RANK_ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)} | more
    command = [sys.executable, "-m", *program, *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_readme_has_a_command_for_each_file() -> None:
    """Each `configs/fit_*.yaml` has one command in the README, and says it itself."""
    files = {path.stem: path.read_text() for path in (REPOSITORY / "configs").glob("fit_*.yaml")}
    assert files.keys() == COMMANDS.keys()
    for name, text in files.items():
        assert f"#     {COMMANDS[name]}\n" in text


@pytest.mark.usefixtures("nvme_ops")
@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_each_file_trains(name: str, tmp_path: Path) -> None:
    """The README's command trains two updates on two ranks, logs what the monitor sees and saves the best shards."""
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    words = [str(nvme) if word == "/local_nvme" else word for word in COMMANDS[name].split()[1:]]
    flags = yaml.safe_load((REPOSITORY / "configs" / f"{name}.yaml").read_text())["trainer"]
    batches = 2 * flags.get("accumulate_grad_batches", 1)
    ended = start([*words, *SHORT, "--trainer.limit_train_batches", str(batches)], tmp_path)
    assert ended.returncode == 0, ended.stderr[-6000:]
    assert re.search(r"^epoch 0, step 2, [\d.]+ steps/s, train_loss [\d.]+", ended.stdout, re.M), "plain lines, no bars"

    logs = tmp_path / "runs" / name / "version_0"
    rows = list(csv.DictReader((logs / "metrics.csv").read_text().splitlines()))
    norms = [float(row["zero/grad_norm_before_clipping"]) for row in rows if row["zero/grad_norm_before_clipping"]]
    assert len(norms) == 2
    assert all(norm > 0 for norm in norms)
    (checkpoint,) = (logs / "checkpoints").iterdir()
    assert len(list(checkpoint.glob("*/*zero_pp_rank_*_optim_states.pt"))) == 2
    config = json.loads((logs / "deepspeed_config.json").read_text())
    stage = int(name.removeprefix("fit_zero")[0])
    assert config["zero_optimization"]["stage"] == stage
    if name == "fit_zero3":
        assert (tmp_path / "runs" / name / "best-model" / "config.json").exists()
        assert "zero/grad_norm/net.model.layers.0" in rows[0]
    if name == "fit_zero3_nvme":
        assert config["zero_optimization"]["offload_param"]["nvme_path"] == str(nvme)
        assert list(nvme.iterdir())


def test_under_torchrun(tmp_path: Path) -> None:
    """The program under torchrun, as a module, evaluates on two ranks, and without a logger leaves no file."""
    words = ["validate", "--config", "configs/fit_zero2.yaml", *SHORT[:2], *SHORT[-6:], "--trainer.logger", "false"]
    torchrun = ["torch.distributed.run", "--nproc_per_node", "2", "--standalone", "-m", "lightning_zero"]
    ended = start([*words, "--trainer.limit_val_batches", "1"], tmp_path, program=torchrun)
    assert ended.returncode == 0, ended.stderr[-6000:]
    assert re.search(r"val_loss +│ +[\d.]+", ended.stdout)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["configs", "examples"]


def test_only_the_first_rank_speaks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What every rank refuses is printed by the first one; the others end with exit code 2, too."""
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert main(["presets", "nothing"]) == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    assert main(["presets", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("lightning-zero presets: ")


def test_a_contradiction_on_several_ranks(tmp_path: Path) -> None:
    """What all ranks refuse is said once, with exit code 2, no traceback, and no process that stays behind."""
    words = ["fit", "--config", "configs/fit_zero3.yaml", "--trainer.strategy.overrides.gradient_clipping", "0.5"]
    ended = start([*words, *SHORT], tmp_path, RUN_OF=str(tmp_path))
    assert ended.returncode == 2
    assert ended.stderr.count("gradient_clipping: overrides says 0.5, Trainer(gradient_clip_val=1.0) says 1.0.") == 1
    assert "lightning-zero fit: gradient_clipping" in ended.stderr
    assert "Traceback" not in ended.stderr
    left = [p.pid for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("RUN_OF") == str(tmp_path)]
    assert left == []


FAULTY = """
from examples.lm import ByteLlama


class Faulty(ByteLlama):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 0:
            raise KeyError("a mistake of the user's")
        return super().training_step(batch, batch_idx)
"""


def test_an_error_on_the_first_rank_ends_all(tmp_path: Path) -> None:
    """A mistake in the user's own code keeps its traceback, and leaves no rank behind that waits for the others."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    words = ["fit", "--config", "configs/fit_zero2.yaml", "--model", "faulty.Faulty", *SHORT]
    ended = start(words, tmp_path, RUN_OF=str(tmp_path))
    assert ended.returncode == 1
    assert 'KeyError: "a mistake of the user\'s"' in ended.stderr
    assert 'faulty.py", line 8, in training_step' in ended.stderr
    left = [p.pid for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("RUN_OF") == str(tmp_path)]
    assert left == []


def test_printed_config_is_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """K12: what `--print_config` prints, a file again, gives the same strategy, to any LightningCLI too."""
    monkeypatch.setattr("sys.argv", ["program"])
    source = ["--config", str(REPOSITORY / "configs" / "fit_zero3.yaml"), "--trainer.accelerator", "cpu"]
    with pytest.raises(SystemExit) as ended:
        ZeroCLI(args=["fit", *source, "--debug", "--print_config"])
    assert ended.value.code == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    keys = yaml.safe_load(printed.read_text())
    said: list[Any] = []
    for cli in (ZeroCLI, LightningCLI):
        text = {name: value for name, value in keys.items() if name not in ("ckpt_path", "weights_only", "debug")}
        text["seed_everything"] = False
        printed.write_text(yaml.safe_dump(text))
        made = cli(args=["--config", str(printed)], run=False, save_config_callback=None)
        assert isinstance(made.trainer.strategy, ZeroStrategy)
        said.append(made.trainer.strategy._run_config._sources.values)
    assert said[0] == said[1]
    assert said[0]["zero_optimization"]["stage"] == 3
    assert said[0]["bf16"] == {"enabled": "auto"}
