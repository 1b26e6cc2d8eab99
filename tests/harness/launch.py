"""Starts ranks, waits for them, ends every one of them, and says what became of each."""

import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from pickle import loads
from typing import Any

from tests.harness import forkserver
from tests.harness.rank import DUMP_SIGNAL, Call, Files, run

_OUTPUT_TAIL = 6000  # characters of a failed rank's output in the message


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """What became of one rank: exactly one of a value, an error or neither (it was killed)."""

    rank: int
    exitcode: int  # 0: returned, 1: raised, -9: died by SIGKILL (its own or the harness's)
    value: Any = None
    error: str | None = None  # the rank's own traceback
    hung: bool = False  # the harness ended it
    stacks: str = ""  # where each thread was when the harness ended it
    output: str = ""  # stdout and stderr

    def __str__(self) -> str:
        if self.error is not None:
            what = f"rank {self.rank} raised:\n{self.error}"
        elif self.hung:
            what = f"rank {self.rank} did not end and was killed; it was here:\n{self.stacks}"
        else:
            what = f"rank {self.rank} died with exit code {self.exitcode}\n{self.stacks}"
        tail = self.output[-_OUTPUT_TAIL:]
        return f"{what.rstrip()}\n--- output of rank {self.rank} ---\n{tail.rstrip()}" if tail else what.rstrip()


class RankError(AssertionError):
    """At least one rank raised, died or hung; the message holds each one's traceback, stack and output."""

    def __init__(self, outcomes: Sequence[RankOutcome]) -> None:
        self.outcomes = tuple(outcomes)
        # those that raised come first: the others mostly hang because of them
        failed = sorted((o for o in outcomes if o.exitcode != 0), key=lambda o: (o.hung, o.error is None, o.rank))
        super().__init__(f"{len(failed)} of {len(outcomes)} ranks failed\n" + "\n\n".join(map(str, failed)))


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    /,
    *args: Any,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Calls `function(*args, **kwargs)` in `world_size` fresh processes and returns what each returned, by rank.

    Args:
        function: at a module's top level; arguments and result are pickled.
        world_size: number of ranks.
        args: passed on, the same on each rank.
        timeout: seconds until every rank is killed and the places where they were are reported.
        env: variables beside those of this process and torchrun's.
        kwargs: passed on.

    Raises:
        RankError: a rank raised, died or hung.
    """
    __tracebackhide__ = True  # the ranks' tracebacks say all
    outcomes = collect_outcomes(function, world_size, *args, timeout=timeout, env=env, **kwargs)
    for outcome in outcomes:
        if outcome.output:  # pytest shows it when the test fails
            print(f"--- output of rank {outcome.rank} of {world_size} ---\n{outcome.output.rstrip()}")
    if any(outcome.exitcode != 0 for outcome in outcomes):
        raise RankError(outcomes)
    return [outcome.value for outcome in outcomes]


def collect_outcomes(
    function: Callable[..., Any],
    world_size: int,
    /,
    *args: Any,
    timeout: float = 120,
    grace: float = 5,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[RankOutcome]:
    """Like `run_ranks`, for ranks that raise, die or hang on purpose: says what became of each and raises nothing.

    Args:
        function: as in `run_ranks`.
        world_size: as in `run_ranks`.
        args: as in `run_ranks`.
        timeout: seconds until every rank is killed.
        grace: seconds that the others have left once a rank has raised or died.
        env: as in `run_ranks`.
        kwargs: as in `run_ranks`.
    """
    call = Call.to(function, args, kwargs)
    context = forkserver.ready()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        files = [Files.of(Path(folder), rank) for rank in range(world_size)]
        variables = _rank_variables(world_size, env or {})
        processes: list[ForkServerProcess] = []
        links: list[Connection] = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                links.append(ours)
                arguments = (call, variables[rank], str(Path.cwd()), files[rank], theirs)
                processes.append(context.Process(target=run, args=arguments, daemon=False))
                processes[rank].start()
                theirs.close()
            hung = _wait(processes, links, timeout, grace)
            _dump_stacks(hung, processes, files)
        finally:
            _end(processes)
            for link in links:
                link.close()
            _free_shared_memory(variables[0]["MASTER_PORT"])
        return [_outcome(rank, processes[rank], files[rank], rank in hung) for rank in range(world_size)]


def _rank_variables(world_size: int, extra: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment of each rank: this process's, one thread each, and what torchrun would set."""
    shared = {
        **os.environ,
        **forkserver.RANK_ENVIRONMENT,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "TORCHELASTIC_RUN_ID": "harness",  # by this Lightning sees that it need not start processes
        **extra,
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def _free_shared_memory(port: str) -> None:
    """Deletes the buffers of 66 MB that DeepSpeed's CPU collectives leave when a rank just ends."""
    for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        buffer.unlink(missing_ok=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _wait(
    processes: Sequence[ForkServerProcess], links: Sequence[Connection], timeout: float, grace: float
) -> set[int]:
    """Waits until every rank has returned or ended, or the deadline; returns the ranks that still run.

    Ranks that have returned stay until all have: rank 0 holds the store that the others may still be asking.
    """
    deadline = time.monotonic() + timeout
    running = set(range(len(processes)))
    returned: set[int] = set()
    watched: dict[Any, int] = {link: rank for rank, link in enumerate(links)}
    watched |= {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        wanted = [thing for thing, rank in watched.items() if rank in running]
        ready = wait(wanted, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for thing in ready:
            rank = watched[thing]
            if isinstance(thing, Connection):
                del watched[thing]
                if not _has_word(thing):
                    continue  # its process is ending, which the sentinel tells
                returned.add(rank)
            else:
                deadline = min(deadline, time.monotonic() + grace)
            running.discard(rank)
    for rank in returned:
        links[rank].send_bytes(b"go")
        processes[rank].join()
    return running


def _has_word(link: Connection) -> bool:
    try:
        return bool(link.recv_bytes())
    except (EOFError, ConnectionResetError):
        return False


def _dump_stacks(hung: set[int], processes: Sequence[ForkServerProcess], files: Sequence[Files]) -> None:
    """Asks the ranks that still run where they are; a stopped process cannot answer, so the wait is short."""
    for rank in hung:
        _signal(processes[rank].pid, DUMP_SIGNAL)
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and not all(_said_where(files[rank].stacks) for rank in hung):
        time.sleep(0.05)


def _said_where(stacks: Path) -> bool:
    return stacks.exists() and "most recent call first" in stacks.read_text()


def _end(processes: Sequence[ForkServerProcess]) -> None:
    """Kills each rank's session, so that neither a rank nor a child of one outlives the call."""
    for process in processes:
        if process.pid is not None:  # None: it was never started
            _signal_session(process.pid)
            process.kill()  # a rank that had not yet come to its own session
            process.join()


def _signal_session(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _signal(pid: int | None, number: int) -> None:
    assert pid is not None
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _outcome(rank: int, process: ForkServerProcess, files: Files, hung: bool) -> RankOutcome:
    value, error = loads(files.report.read_bytes()) if files.report.exists() else (None, None)
    code = process.exitcode
    assert code is not None
    return RankOutcome(
        rank=rank,
        exitcode=code,
        value=value,
        error=error,
        hung=hung,
        stacks=files.stacks.read_text() if files.stacks.exists() else "",
        output=files.output.read_text(errors="replace") if files.output.exists() else "",
    )
