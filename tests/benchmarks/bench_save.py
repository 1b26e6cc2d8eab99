"""Saves a live engine's checkpoint with ours and with DeepSpeed's ``save_checkpoint``, in turns: seconds, bytes.

    python -m tests.benchmarks.bench_save --millions 30 --stage 3 --rounds 9

All turns run on the same engine in the same processes; seconds are those of the slowest rank. ``new`` is a fresh
folder, ``over`` overwrites one, which DeepSpeed does in place and ours does beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.bench_gather import model


def measure(save: Callable[[], Any]) -> float:
    """Seconds of one save on this rank; all ranks start together."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    save()
    dist.barrier()
    return time.perf_counter() - start


def run(rank: int, options: argparse.Namespace, scratch: str, port: int) -> None:
    """One rank: a training of one step, then the turns."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks), GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(options.ranks))
    os.environ.update(TORCHELASTIC_RUN_ID="bench", OMP_NUM_THREADS="1")
    import lightning as L
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    from lightning_zero import ZeroStrategy

    torch.set_num_threads(1)
    strategy = ZeroStrategy(stage=options.stage)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=options.ranks, precision="bf16-mixed", max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model(options.millions), DataLoader(torch.arange(options.ranks), batch_size=1))  # type: ignore[arg-type]
    systems: dict[str, Callable[[Path], Any]] = {
        "ours": lambda folder: trainer.save_checkpoint(folder),
        "deepspeed": lambda folder: strategy.model.save_checkpoint(str(folder), tag="checkpoint"),
    }
    seconds: dict[str, list[float]] = {f"{kind} {name}": [] for kind in ("new", "over") for name in systems}
    for turn in range(options.rounds + 1):  # the first one warms up
        for name in list(systems) if turn % 2 else list(systems)[::-1]:
            folder = Path(scratch) / f"{name}.ckpt"
            for kind in ("new", "over"):
                own = measure(lambda name=name, folder=folder: systems[name](folder))  # type: ignore[misc]
                ranks: list[Any] = [None] * options.ranks
                dist.all_gather_object(ranks, own)
                if turn:
                    seconds[f"{kind} {name}"].append(max(ranks))
                if rank == 0:
                    os.sync()
                dist.barrier()
            if rank == 0:
                shutil.rmtree(folder)
            dist.barrier()
    if rank == 0:
        medians = {name: statistics.median(runs) for name, runs in seconds.items()}
        for kind in ("new", "over"):
            ours, theirs = medians[f"{kind} ours"], medians[f"{kind} deepspeed"]
            print(f"{kind:5} ours {ours:6.3f} s   deepspeed {theirs:6.3f} s   ratio {ours / theirs:5.2f}")
        print(json.dumps({"options": vars(options), "seconds": seconds}, default=str), flush=True)
    dist.barrier()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=30, help="parameters of the model")
    parser.add_argument("--stage", type=int, default=3, choices=[1, 2, 3])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    options = parser.parse_args()
    import torch.multiprocessing

    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        port = 29000 + os.getpid() % 1000
        torch.multiprocessing.spawn(run, (options, scratch, port), nprocs=options.ranks)


if __name__ == "__main__":
    main()
