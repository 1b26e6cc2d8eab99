"""Consolidates one checkpoint with our converter, DeepSpeed's and Lightning's, in turns: seconds, memory, bytes.

    python tests/benchmarks/bench_consolidate.py --millions 270 --stage 2 --rounds 3

Each conversion runs in a fresh process. Seconds exclude imports (CPU seconds count all threads, and matter on a machine
that others use, too); memory is the peak of the process's anonymous pages (RssAnon, sampled) above what it held before
the conversion, so that mapped files, which the kernel can drop at any time, do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

CONVERTERS = {
    "ours": """
from lightning_zero.checkpoint.consolidate import consolidate
def convert(): consolidate(source, output, format="safetensors", dtype=dtype)
""",
    "deepspeed": """
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_state_dict
def convert(): convert_zero_checkpoint_to_state_dict(source, output, dtype=dtype, safe_serialization=True)
""",
    "lightning": """
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
def convert(): convert_zero_checkpoint_to_fp32_state_dict(source, output)
""",
}

HARNESS = """
import sys, time
source, output, dtype = sys.argv[1:4]
{code}
def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
print("ready", anonymous(), flush=True)
sys.stdin.readline()
start, cpu = time.perf_counter(), time.process_time()
convert()
print("took", time.perf_counter() - start, time.process_time() - cpu, flush=True)
"""


def make(rank: int, world_size: int, folder: str, stage: int, millions: int, port: int) -> None:
    """One rank's part of a run that saves a checkpoint: a bf16 transformer-like model, one step of AdamW."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    width = 1024
    blocks = max(1, round((millions * 1e6 - 32_000 * width) / (12 * width * width)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }

    def build() -> torch.nn.Module:
        layers: list[torch.nn.Module] = []
        for _ in range(blocks):
            layers += [
                torch.nn.Linear(width, 8 * width, bias=False),
                torch.nn.Linear(8 * width, width // 2, bias=False),
            ]
            layers += [torch.nn.LayerNorm(width // 2), torch.nn.Linear(width // 2, width)]
        return torch.nn.Sequential(torch.nn.Embedding(32_000, width), *layers)

    if stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = build()
    else:
        model = build()
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    engine.backward(engine(torch.tensor([rank])).float().pow(2).mean())
    engine.step()
    engine.save_checkpoint(folder)


def convert(name: str, source: Path, output: Path, dtype: str) -> dict[str, float]:
    """Run one converter in a fresh process."""
    code = HARNESS.format(code=CONVERTERS[name])
    process = subprocess.Popen(
        [sys.executable, "-c", code, source, output, dtype],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    before = 0
    for line in process.stdout:
        if line.startswith("ready"):
            before = int(line.split()[1])
            break
    peak = [before]
    watcher = threading.Thread(target=_watch, args=(process.pid, peak), daemon=True)
    watcher.start()
    print(file=process.stdin, flush=True)
    took, cpu = next(map(float, line.split()[1:]) for line in process.stdout if line.startswith("took"))
    process.communicate()
    paths = [output] if output.is_file() else list(output.iterdir())
    size = sum(path.stat().st_size for path in paths)
    return {"seconds": took, "CPU seconds": cpu, "peak MB": (peak[0] - before) / 1000, "written MB": size / 1e6}


def _watch(pid: int, peak: list[int]) -> None:
    while True:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            peak[0] = max(peak[0], next(int(line.split()[1]) for line in status.splitlines() if "RssAnon" in line))
        except (OSError, StopIteration):
            return
        time.sleep(0.005)


def main() -> None:
    """Make a checkpoint unless one is given, convert it in turns, print medians and JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=30, help="parameters of the model")
    parser.add_argument("--stage", type=int, default=2, choices=[1, 2, 3])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to keep the checkpoint; reused when it is there")
    parser.add_argument("--only", nargs="*", choices=list(CONVERTERS), default=list(CONVERTERS))
    options = parser.parse_args()
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as scratch:
        source = options.folder or Path(scratch) / "checkpoint"
        if not (source / "latest").is_file():
            import torch.multiprocessing

            arguments = (options.ranks, str(source), options.stage, options.millions, 29000 + os.getpid() % 1000)
            torch.multiprocessing.spawn(make, arguments, nprocs=options.ranks)
        del os.environ["OMP_NUM_THREADS"]
        results: dict[str, list[dict[str, float]]] = {name: [] for name in options.only}
        for turn in range(options.rounds):
            names = options.only if turn % 2 == 0 else options.only[::-1]
            for name in names:
                output = Path(scratch) / name
                results[name].append(convert(name, source, output, options.dtype))
                shutil.rmtree(output) if output.is_dir() else output.unlink()
    medians = {
        name: {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
        for name, runs in results.items()
    }
    for name, values in medians.items():
        print(f"{name:10}", "  ".join(f"{value:8.2f} {key}" for key, value in values.items()))
    print(json.dumps({"options": vars(options), "runs": results}, default=str))


if __name__ == "__main__":
    main()
