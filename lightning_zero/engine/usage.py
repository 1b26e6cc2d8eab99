"""How much memory the processes of a run use, and numbers of all ranks at once."""

from __future__ import annotations

from collections.abc import Mapping

import psutil
import torch
import torch.distributed as dist

__all__ = ["memory", "of_all_ranks"]

_GB = 1e9


def memory(device: torch.device) -> dict[str, float]:
    """Memory in GB: the most that tensors have taken on the device, that of the process, and that in use on the host.

    Args:
        device: This rank's device; a CPU has no memory of its own.
    """
    host = psutil.virtual_memory()
    used = {
        "process_memory_gb": psutil.Process().memory_info().rss / _GB,
        "host_memory_gb": (host.total - host.available) / _GB,
    }
    if device.type == "cuda":
        used["device_memory_gb"] = torch.cuda.max_memory_allocated(device) / _GB
    return used


def of_all_ranks(numbers: Mapping[str, float], device: torch.device) -> dict[str, list[float]]:
    """Each number as every rank has it, in the order of the ranks, by one message. Collective.

    Args:
        numbers: The same names on all ranks.
        device: Where the process group communicates.
    """
    own = torch.tensor(list(numbers.values()), dtype=torch.float64, device=device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return {name: [float(rank[place]) for rank in every] for place, name in enumerate(numbers)}
