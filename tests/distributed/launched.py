"""What each launcher's test starts: trains on two processes and writes down who took part. Not a test itself."""

import json
import sys
from pathlib import Path

import torch

import lightning_zero  # noqa: F401  # registers the strategy names
from tests.models import Regression, loader, trainer


def main(folder: Path) -> None:
    """Trains, then leaves one file per rank in ``folder``."""
    torch.set_num_threads(1)
    module = Regression()
    runner = trainer("zero3_offload", epochs=1)
    runner.fit(module, loader())
    report = {
        "rank": runner.global_rank,
        "local_rank": runner.local_rank,
        "world_size": torch.distributed.get_world_size(),
        "environment": type(runner.strategy.cluster_environment).__name__,
        "updates": runner.global_step,
        "losses": module.losses,
    }
    (folder / f"{runner.global_rank}.json").write_text(json.dumps(report))
    runner.strategy.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
