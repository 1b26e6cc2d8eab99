"""Writes the 16-bit weights of a live engine with our gathered save and DeepSpeed's, in turns: seconds, memory, bytes.

    python tests/benchmarks/bench_gather.py --millions 30 --stage 3 --rounds 5

All turns run on the same engine in the same processes. Seconds are those of the slowest rank; memory is the largest
rank's peak of anonymous pages (RssAnon, sampled) above what it held before the turn.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WIDTH = 1024


def measure(save: Callable[[], None]) -> tuple[float, float, float]:
    """Seconds, processor seconds and peak MB of one save on this rank; all ranks start together."""
    import torch.distributed as dist

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else freed memory is used again, and nothing is seen to grow
    dist.barrier()
    before = peak = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start, cpu = time.perf_counter(), time.process_time()
    save()
    dist.barrier()
    took, used = time.perf_counter() - start, time.process_time() - cpu
    done.set()
    watcher.join()
    return took, used, (peak - before) / 1000


def anonymous() -> int:
    """This process's anonymous memory in kB."""
    with open("/proc/self/status") as status:  # noqa: PTH123  # sampled often
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def model(millions: int) -> Any:
    """A LightningModule of about that many parameters, in matrices of a transformer's sizes."""
    import lightning as L
    import torch
    from torch import nn

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = None

        def configure_model(self) -> None:
            if self.net is not None:
                return
            layers: list[nn.Module] = []
            for _ in range(max(1, round((millions * 1e6 - 8_000 * WIDTH) / (12 * WIDTH * WIDTH)))):
                layers += [nn.Linear(WIDTH, 8 * WIDTH, bias=False), nn.Linear(8 * WIDTH, WIDTH // 2, bias=False)]
                layers += [nn.LayerNorm(WIDTH // 2), nn.Linear(WIDTH // 2, WIDTH)]
            self.net = nn.Sequential(nn.Embedding(8_000, WIDTH), *layers)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).float().pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    return Module()


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
    gathering = {"stage3_gather_16bit_weights_on_model_save": True} if options.stage == 3 else {}
    strategy = ZeroStrategy(stage=options.stage, config={"zero_optimization": gathering})
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=options.ranks, precision="bf16-mixed", max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model(options.millions), DataLoader(torch.arange(options.ranks), batch_size=1))  # type: ignore[arg-type]
    systems: dict[str, Callable[[Path], Any]] = {
        "ours": lambda folder: strategy.save_gathered_weights(folder, dtype="auto"),
        "deepspeed": lambda folder: strategy.model.save_16bit_model(str(folder)),
    }
    results: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    for turn in range(options.rounds + 1):  # the first one warms up
        for name in list(systems) if turn % 2 else list(systems)[::-1]:
            folder = Path(scratch) / name
            own = measure(lambda name=name, folder=folder: systems[name](folder))  # type: ignore[misc]
            ranks: list[Any] = [None] * options.ranks
            dist.all_gather_object(ranks, own)
            if rank == 0:
                seconds, cpu, memory = zip(*ranks, strict=True)
                size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
                if turn:
                    took = {"seconds": max(seconds), "CPU seconds, all ranks": sum(cpu)}
                    results[name].append(took | {"peak MB": max(memory), "written MB": size})
                shutil.rmtree(folder)
                os.sync()
            dist.barrier()
    if rank == 0:
        for name, runs in results.items():
            medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            print(f"{name:10}", "  ".join(f"{value:8.2f} {key}" for key, value in medians.items()))
        print(json.dumps({"options": vars(options), "runs": results}, default=str), flush=True)
    dist.barrier()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=30, help="parameters of the model")
    parser.add_argument("--stage", type=int, default=3, choices=[0, 1, 2, 3])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    options = parser.parse_args()
    import torch.multiprocessing

    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        port = 29000 + os.getpid() % 1000
        torch.multiprocessing.spawn(run, (options, scratch, port), nprocs=options.ranks)


if __name__ == "__main__":
    main()
