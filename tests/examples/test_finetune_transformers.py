"""The example that fine-tunes a pretrained model, much shortened."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.harness.forkserver import RANK_ENVIRONMENT, REPOSITORY


def test_finetune_transformers(tmp_path: Path) -> None:
    """Two processes under ``zero3_offload`` fine-tune the real pretrained model, are right far more often than before,
    keep the best shards, and export a folder that ``AutoModel`` and ``AutoTokenizer`` read.
    """
    short = ["--limit", "32", "--epochs", "1", "--length", "32", "--folder", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / "finetune_transformers.py"), *short],
        env=os.environ | RANK_ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]

    [(before, after)] = re.findall(r"accuracy: ([\d.]+) before, ([\d.]+) after", done.stdout)
    assert float(before) < 0.25  # one of twelve by chance
    assert float(after) > 0.4, after
    assert re.search(r"is about \w+$", done.stdout.strip())

    checkpoint, exported = sorted((tmp_path / "run").iterdir(), key=lambda path: path.suffix != ".ckpt")
    assert f"val_accuracy={after}" in checkpoint.name
    assert {path.name for path in exported.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    ranks = {re.search(r"rank_(\d)", path.name)[1] for path in checkpoint.glob("*/*zero_pp_rank_*_optim_states.pt")}
    assert ranks == {"0", "1"}

    program = "import sys, transformers; print(type(transformers.AutoModel.from_pretrained(sys.argv[1])).__name__)"
    read = subprocess.run([sys.executable, "-c", program, str(exported)], capture_output=True, text=True, check=True)
    assert read.stdout.strip() == "BertModel"
