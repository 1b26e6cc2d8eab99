"""The warm forkserver: one process that has imported everything slow, from which every rank is forked.

The server imports `tests.harness.preload`. It holds no thread and no OpenMP pool, so a fork of it is a clean process.
"""

import functools
import multiprocessing
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

# One thread per rank: the machine's cores are shared by the ranks, and libgomp reads its variable when it is loaded.
# Plain DeepSpeed compiles with the first ninja on PATH, and another release than ours would compile everything again.
RANK_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PATH": os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath))),
}


@contextmanager
def _environment(**changes: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@functools.cache
def start() -> ForkServerContext:
    """Starts the server, once, and returns at once: the imports go on in the background."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.harness.preload"])
    # The server's own sys.path comes from its environment only.
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    with _environment(PYTHONPATH=path, **RANK_ENVIRONMENT):
        forkserver.ensure_running()
    return context


@functools.cache
def ready() -> ForkServerContext:
    """Starts the server and waits until it has imported everything, so that no test's timeout pays for that.

    Nor for compiling the ops that almost every run on CPU loads.
    """
    context = start()
    _call(context, "deepspeed_shm_comm", "cpu_adam")
    return context


def build(*ops: str) -> None:
    """Compiles DeepSpeed's ops when they are not yet in the cache; it may take minutes."""
    _call(ready(), *ops)


def _call(context: ForkServerContext, *ops: str) -> None:
    process = context.Process(target=_build, args=ops)
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"DeepSpeed's ops {ops} could not be compiled; see the output")


def _build(*ops: str) -> None:
    from lightning_zero.engine.ops import build_ops

    build_ops(ops, local_rank=0)
