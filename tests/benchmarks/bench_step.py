"""Times one training step of the same Llama under raw DeepSpeed, ZeroStrategy, Lightning's DeepSpeedStrategy and ddp.

    python tests/benchmarks/bench_step.py --stages 2 3 --rounds 20 --steps 3

Each system has two CPU processes of its own. All exist at the same time and wait; the systems take turns of a few
steps, in an order that changes every round. A ratio divides a turn by raw DeepSpeed's turn of the same round, so
that a slow minute of the machine slows both; the median over the rounds is reported. A turn lasts from the start of one
step to the start of the step after the last, so that everything that a loop does between steps counts. Beside the time
on the clock stands the processor time of one process, which other programs on the machine hardly change.

With `--model trivial` the step does almost nothing, and what is left is the fixed cost of a micro-batch;
`trivial-nested` calls the LightningModule itself, as `self(batch)`, in its training step.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from examples.lm import ByteLlama, PythonTopics
from tests.harness import forkserver

RAW = "raw DeepSpeed"
SYSTEMS = (RAW, "ZeroStrategy", "DeepSpeedStrategy", "ddp")
WORLD = 2
CLIPPING = 1.0


def config(stage: int) -> dict[str, Any]:
    """The same DeepSpeed config for all who take one."""
    return {
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": CLIPPING,
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
    }


BATCH_SIZE = 8


class Quiet(ByteLlama):
    """The example's Llama without logging, for a raw loop does not log either."""

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        return loss

    def forward(self, batch: Tensor) -> Tensor:
        return self.loss(batch)  # the raw loop calls it

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Trivial(Quiet):
    """One small layer: its arithmetic costs nothing."""

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Linear(8, 8)

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.net(batch[:, :8].float()).square().mean()
        return loss


class TrivialNested(Trivial):
    """The same, with a training step that calls the module itself."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch)
        return loss


MODELS: Mapping[str, Callable[[], Quiet]] = {"llama": Quiet, "trivial": Trivial, "trivial-nested": TrivialNested}


class Turns(L.Callback):
    """Lets the steps through by turns: waits for a number of steps, says how long they took, and waits again."""

    def __init__(self, coordinator: Connection) -> None:
        self.coordinator = coordinator
        self.left = 0
        self.started: tuple[float, float] | None = None

    def on_train_batch_start(self, *_: Any) -> None:
        """Called before each step."""
        if self.left == 0:
            if self.started is not None:
                wall, cpu = self.started
                self.coordinator.send((time.perf_counter() - wall, time.process_time() - cpu))
            self.left = self.coordinator.recv()
            self.started = time.perf_counter(), time.process_time()
        self.left -= 1


class OnCPU(DeepSpeedStrategy):
    """Lightning's own strategy past its check that the accelerator is CUDA."""

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        super(DeepSpeedStrategy, self).setup_distributed()
        self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)  # `index` must be a number


def loader() -> DataLoader[Tensor]:
    """The example's training data."""
    return PythonTopics(batch_size=BATCH_SIZE).train_dataloader()


def forever(batches: DataLoader[Tensor], rank: int) -> Iterator[Tensor]:
    """Batches of one rank, epoch after epoch, shuffled as Lightning shuffles them."""
    sampler: DistributedSampler[Tensor] = DistributedSampler(batches.dataset, WORLD, rank, shuffle=True)  # type: ignore[arg-type]
    sharded = DataLoader(batches.dataset, BATCH_SIZE, sampler=sampler, drop_last=True)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from sharded


def run_raw(model: Quiet, stage: int, turns: Turns) -> None:
    """The loop of DeepSpeed's own documentation."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    with deepspeed.zero.Init(config_dict_or_path=config(stage), enabled=stage == 3):
        model.configure_model()
    engine, *_ = deepspeed.initialize(model=model, optimizer=model.configure_optimizers(), config=config(stage))
    for batch in forever(loader(), int(os.environ["RANK"])):
        turns.on_train_batch_start()
        engine.backward(engine(batch))
        engine.step()


def run_lightning(model: Quiet, strategy: Any, turns: Turns, *, clip: bool) -> None:
    """A silent Trainer."""
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=WORLD,
        max_epochs=-1,
        gradient_clip_val=CLIPPING if clip else None,
        callbacks=[turns],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader())


def run_rank(system: str, model_name: str, stage: int, environment: dict[str, str], coordinator: Connection) -> None:
    """One process of one system; the parent ends it."""
    os.environ.update(environment)
    output = os.open(environment["BENCH_OUTPUT"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, turns = MODELS[model_name](), Turns(coordinator)
    if system == RAW:
        run_raw(model, stage, turns)
    elif system == "ZeroStrategy":
        from lightning_zero import ZeroStrategy

        run_lightning(model, ZeroStrategy(config=config(stage)), turns, clip=True)
    elif system == "DeepSpeedStrategy":
        run_lightning(model, OnCPU(config=config(stage)), turns, clip=False)  # it clips by the config
    else:
        run_lightning(model, "ddp", turns, clip=True)


class Turn(NamedTuple):
    """Milliseconds per step of one turn."""

    wall: float
    cpu: float  # of one process; other programs on the machine do not change it much


class System:
    """The processes of one system, seen from the parent."""

    def __init__(self, name: str, model: str, stage: int, folder: Path) -> None:
        context = forkserver.ready()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.ends, self.processes = [], []
        for rank in range(WORLD):
            environment = {
                **forkserver.RANK_ENVIRONMENT,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(WORLD),
                "LOCAL_SIZE": str(
                    WORLD
                ),  # as the deepspeed launcher says; DeepSpeed runs `numactl` at each step without
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "bench",
                "BENCH_OUTPUT": str(folder / f"{name}.{stage}.{rank}.log"),
            }
            here, there = Pipe()
            process = context.Process(target=run_rank, args=(name, model, stage, environment, there), daemon=True)
            process.start()
            self.ends.append(here)
            self.processes.append(process)
            there.close()

    def turn(self, steps: int) -> Turn:
        """One turn, by the rank that took longer."""
        for end in self.ends:
            end.send(steps)
        walls, cpus = zip(*(end.recv() for end in self.ends), strict=True)
        return Turn(wall=max(walls) / steps * 1000, cpu=max(cpus) / steps * 1000)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def bench(model: str, stage: int, rounds: int, steps: int, folder: Path) -> dict[str, list[Turn]]:
    """Milliseconds per step, by system and round; two more turns before them are not counted."""
    systems = {name: System(name, model, stage, folder) for name in SYSTEMS}
    times: dict[str, list[Turn]] = {name: [] for name in SYSTEMS}
    try:
        for number in range(-2, rounds):
            shift = number % len(SYSTEMS)
            for name in (*SYSTEMS[shift:], *SYSTEMS[:shift]):
                taken = systems[name].turn(steps)
                if number >= 0:
                    times[name].append(taken)
    finally:
        for system in systems.values():
            system.close()
    return times


def report(model: str, stage: int, times: Mapping[str, list[Turn]]) -> None:
    """One row per system: median of the times, of the paired ratios (with quartiles), and of the paired differences."""
    for name in SYSTEMS:
        pairs = list(zip(times[name], times[RAW], strict=True))
        walls = [mine.wall / raw.wall for mine, raw in pairs]
        low, middle, high = statistics.quantiles(walls, n=4)
        cpus = statistics.median(mine.cpu / raw.cpu for mine, raw in pairs)
        more = statistics.median(mine.cpu - raw.cpu for mine, raw in pairs)
        wall, cpu = (statistics.median(getattr(turn, clock) for turn in times[name]) for clock in Turn._fields)
        print(
            f"| {model} | {stage} | {name} | {wall:.1f} | {middle:.3f} ({low:.3f}-{high:.3f}) | "
            f"{cpu:.1f} | {cpus:.3f} | {more:+.1f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3, help="steps in one turn of the Llama; fifty times as many else")
    parser.add_argument("--logs", type=Path, help="where the processes' output goes (default: a temporary folder)")
    arguments = parser.parse_args()
    print("| model | stage | system | ms per step | x raw DeepSpeed (quartiles) | CPU ms | x raw | CPU ms more |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        logs = arguments.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        for model, stage in itertools.product(arguments.model, arguments.stages):
            steps = arguments.steps * (1 if model == "llama" else 50)
            report(model, stage, bench(model, stage, arguments.rounds, steps, logs))


if __name__ == "__main__":
    main()
