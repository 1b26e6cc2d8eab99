"""Where ranks meet before and after one of them works on files."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_zero.errors import CheckpointError

T = TypeVar("T")


def meet(path: str | PathLike[str], *, call: str) -> None:
    """Waits for all ranks before a save, since one on some of them alone would wait for ever. Collective.

    Args:
        path: The checkpoint, for the message.
        call: The call that saves, for the message.

    Raises:
        CheckpointError: The others do something else, or nothing within the strategy's timeout.
    """
    try:
        dist.barrier()
    except RuntimeError as failure:  # gloo's and NCCL's timeouts, and another collective of ranks that went on
        raise CheckpointError(
            f"saving {path} failed: the other ranks are not saving ({failure}). Call `{call}` on all ranks, not on "
            "rank 0 alone."
        ) from failure


def on_rank_zero(work: Callable[[], T], doing: str) -> T:
    """The result of work that one rank does for all; its error, on all ranks. Collective.

    Args:
        work: The work.
        doing: What it is, for messages.

    Raises:
        CheckpointError: It failed.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except CheckpointError as error:
            outcome[1] = error
        except OSError as error:
            outcome[1] = CheckpointError(f"{doing} failed: {error}.")
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result
