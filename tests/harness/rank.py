"""What runs inside one rank: prepare the process, call the function, leave a report on disk."""

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

DUMP_SIGNAL = signal.SIGQUIT  # SIGTERM, SIGINT and SIGUSR1 belong to the tests of preemption
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function by reference, and the pickled arguments (tensors by value, not as shared memory)."""

    module: str
    name: str
    arguments: bytes

    @classmethod
    def to(cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Call":
        name = function.__qualname__
        if "." in name:
            raise TypeError(
                f"{function.__module__}.{name} is not at a module's top level, so that ranks cannot import it"
            )
        return cls(module=function.__module__, name=name, arguments=pickle.dumps((args, kwargs)))

    def __call__(self) -> Any:
        function = getattr(import_module(self.module), self.name)
        function = getattr(function, "rank_body", function)
        args, kwargs = pickle.loads(self.arguments)
        return function(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Files:
    """Where one rank leaves what it has to say."""

    report: Path  # pickled (value, traceback or None)
    output: Path  # stdout and stderr
    stacks: Path  # where each thread was when the parent asked

    @classmethod
    def of(cls, folder: Path, rank: int) -> "Files":
        return cls(report=folder / f"{rank}.report", output=folder / f"{rank}.output", stacks=folder / f"{rank}.stacks")


def run(call: Call, environment: dict[str, str], cwd: str, files: Files, parent: Connection) -> None:
    """The target of a rank's process."""
    _die_with_the_server()
    os.setsid()  # the parent ends the whole session, so that no child of a rank survives
    _redirect_output(files.output)
    stacks = files.stacks.open("w")
    faulthandler.register(DUMP_SIGNAL, file=stacks, all_threads=True)
    faulthandler.enable(stacks)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    error = None
    value = None
    try:
        import torch

        torch.set_num_threads(1)
        value = call()
        report = pickle.dumps((value, None))
    except BaseException:  # also pytest.fail, pytest.skip and SystemExit: whatever ends a rank is reported
        error = traceback.format_exc()
        report = pickle.dumps((None, error))
    unfinished = files.report.with_suffix(".unfinished")
    unfinished.write_bytes(report)
    unfinished.rename(files.report)
    sys.stdout.flush()
    sys.stderr.flush()
    if error is None:
        _stay_until_released(parent)
    os._exit(1 if error else 0)  # not a finaliser more: gloo's threads may wait there for ranks that are gone


def _stay_until_released(parent: Connection) -> None:
    """Keeps this rank's store and sockets alive for ranks that are still in the last collective."""
    parent.send_bytes(b"done")
    parent.poll(None)  # the parent's word, or its end


def _die_with_the_server() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _redirect_output(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # the inherited objects may be a capture of the process that started the server
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - open as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - as above
