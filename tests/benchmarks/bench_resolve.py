"""How long resolving a config of 100 keys takes: ``python tests/benchmarks/bench_resolve.py``."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from lightning_zero.config.dotted import leaves, put
from lightning_zero.config.facts import Fact, RunFacts
from lightning_zero.config.keys import KINDS
from lightning_zero.config.resolve import resolve_config
from lightning_zero.config.rules import RULES

ROUNDS = 200
BUDGET_MS = 5.0


def config() -> dict[str, Any]:
    """Every key that a rule fills, as "auto", and known keys with literals up to 100."""
    tree: dict[str, Any] = {}
    for rule in RULES:
        put(tree, rule.key, "auto")
    put(tree, "zero_optimization.stage", 3)
    literals = {"integer": 1, "number": 1.0, "boolean": False, "count": 1, "updates": 1, "text": "fp32"}
    for key, kind in KINDS.items():
        if sum(1 for _ in leaves(tree)) == 100:
            break
        if (
            kind in literals
            and key not in {rule.key for rule in RULES}
            and not key.endswith("device")
            and "cpu_offload" not in key
        ):
            put(tree, key, literals[kind])
    put(tree, "zero_optimization.stage", 3)
    return tree


def main() -> int:
    """Print the median and the slowest round; exit 1 above the budget."""
    tree = config()
    run = RunFacts(
        world_size=Fact(2, "Trainer(devices=2)"),
        micro_batch_size=Fact(8, "DataLoader.batch_size"),
        accumulate_grad_batches=Fact(4, "Trainer(accumulate_grad_batches=4)"),
        precision=Fact("bf16-mixed", "Trainer(precision='bf16-mixed')"),
        learning_rate=Fact(1e-4, "module.hparams.lr"),
        total_steps=Fact(1000, "trainer.estimated_stepping_batches"),
        hidden_size=Fact(768, "module.net.config.hidden_size"),
    )
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        resolve_config(tree, run)
        times.append(1e3 * (time.perf_counter() - start))
    median = statistics.median(times)
    sys.stdout.write(f"{sum(1 for _ in leaves(tree))} keys: median {median:.2f} ms, slowest {max(times):.2f} ms\n")
    return int(median > BUDGET_MS)


if __name__ == "__main__":
    sys.exit(main())
