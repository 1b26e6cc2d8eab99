"""What the import costs over that of lightning: ``python tests/benchmarks/bench_import.py [--rounds 15]``.

Every import runs in a process of its own. They take turns, so that what else the machine does hits all alike; a round's
ratio divides a turn by that of lightning in the same round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

BUDGET = 1.15
IMPORTS = {
    "lightning": "import lightning",
    "lightning again": "import lightning",
    "lightning_zero": "import lightning, lightning_zero",
    "lightning_zero.ZeroCLI": "import lightning, lightning_zero; lightning_zero.ZeroCLI",
}


def cost(statement: str) -> tuple[float, float]:
    """Seconds, and seconds of processor time, that a fresh interpreter takes to start, do this and end."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", statement])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{statement} failed")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime


def rounds(count: int) -> Iterator[dict[str, tuple[float, float]]]:
    """Each import's cost in each round, the order turned by one from round to round."""
    names = list(IMPORTS)
    for number in range(count):
        turn = number % len(names)
        yield {name: cost(IMPORTS[name]) for name in names[turn:] + names[:turn]}


def main() -> int:
    """Print medians and ratios; exit 1 when the package costs more than its budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    for statement in IMPORTS.values():  # files into the page cache
        cost(statement)
    taken = list(rounds(options.rounds))
    sys.stdout.write(
        "| import | seconds | x lightning (quartiles) | CPU seconds | x lightning, CPU |\n|---|---|---|---|---|\n"
    )
    ratio = 0.0
    for name in IMPORTS:
        wall = [each[name][0] for each in taken]
        processor = [each[name][1] for each in taken]
        ratios = [each[name][0] / each["lightning"][0] for each in taken]
        low, middle, high = statistics.quantiles(ratios, n=4)
        of_processor = statistics.median(each[name][1] / each["lightning"][1] for each in taken)
        sys.stdout.write(
            f"| `{name}` | {statistics.median(wall):.2f} | {middle:.3f} ({low:.3f}-{high:.3f}) | "
            f"{statistics.median(processor):.2f} | {of_processor:.3f} |\n"
        )
        ratio = of_processor if name == "lightning_zero" else ratio
    return int(ratio > BUDGET)


if __name__ == "__main__":
    sys.exit(main())
