"""The operators that DeepSpeed compiles at first use: which a run needs, whether they can be had, and building them.

What is missing is found before the model is built; what has to be compiled is compiled by one process of each host
before the ranks need it.
"""

from __future__ import annotations

import copy
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_zero._compat.torch_extensions import LOCK, extension_folder
from lightning_zero.engine.accelerator import environment
from lightning_zero.engine.build_lock import SAY_AFTER, build_turn, pass_lock
from lightning_zero.errors import ConfigError

_log = logging.getLogger(__name__)

SHARED_MEMORY = "deepspeed_shm_comm"
"""Collectives between the CPU ranks of one host; without it they go through gloo."""

_OFFLOAD_DEVICES = ("cpu", "nvme")
# optimizer type in the config -> the op with the optimizer offloaded, and without
_OPTIMIZER_OPS = {
    "adam": ("cpu_adam", "fused_adam"),
    "adamw": ("cpu_adam", "fused_adam"),
    "muon": ("cpu_adam", "fused_adam"),
    "adagrad": ("cpu_adagrad", None),
    "lion": ("cpu_lion", "fused_lion"),
    "lamb": ("fused_lamb", "fused_lamb"),
}
# op -> what runs in its place
_REPLACEMENTS = {
    SHARED_MEMORY: "ranks of one host talk through gloo instead",
    "cpu_adam": "torch's own Adam updates the offloaded states instead, several times slower",
    "fused_adam": "torch's own Adam is used instead",
}
_COMPILED_FOR_CUDA = ("async_io", "fused_adam", "fused_lamb", "fused_lion")


@dataclass(frozen=True, kw_only=True)
class OpProblem:
    """Why an op cannot be had on this machine.

    Args:
        op: DeepSpeed's name of the op.
        reason: What is missing.
        remedy: What to do, mostly a command.
    """

    op: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"DeepSpeed's {self.op} cannot be compiled: {self.reason}. {self.remedy}"


def required_ops(config: Mapping[str, Any], accelerator: str) -> tuple[str, ...]:
    """Names of the ops that a run with this config loads, in the order in which it needs them.

    Args:
        config: A resolved config.
        accelerator: ``"cpu"`` or ``"cuda"``.
    """
    names = [SHARED_MEMORY] if accelerator == "cpu" and sys.platform == "linux" else []
    if "nvme" in (_offload_device(config, "offload_optimizer"), _offload_device(config, "offload_param")):
        names += ["pin_memory", "async_io"]  # async_io links to pin_memory
    optimizer = _optimizer_op(config)
    return (*names, optimizer) if optimizer else tuple(names)


def wants_cpu_optimizer(config: Mapping[str, Any]) -> bool:
    """Whether an Adam from code is to be DeepSpeed's CPU Adam: the optimizer is offloaded and the flag is not false."""
    offloaded = _offload_device(config, "offload_optimizer") is not None
    return offloaded and config.get("zero_force_ds_cpu_optimizer") is not False


def check_ops(names: Iterable[str]) -> tuple[OpProblem, ...]:
    """What stands in the way of each op, found without compiling it; nothing for ops that are compiled already.

    Args:
        names: Names of ops, as :func:`required_ops` gives them.
    """
    problems = []
    for name in names:
        checks = (_no_such_op,) if _is_built(name) else _CHECKS
        found = next(filter(None, (check(name) for check in checks)), None)
        if found is not None:
            problems.append(OpProblem(op=name, reason=found[0], remedy=found[1]))
    return tuple(problems)


def refuse_missing(config: Mapping[str, Any], accelerator: str) -> None:
    """Refuses a config whose ops cannot be had, and says what runs in the place of those that can be replaced.

    Args:
        config: A resolved config.
        accelerator: ``"cpu"`` or ``"cuda"``; deepspeed is imported for it.

    Raises:
        ConfigError: An op that nothing can replace cannot be had; the message has a line for each.
    """
    problems = check_ops(required_ops(config, accelerator))
    _refuse(problems)
    for problem in problems:
        _log.warning("%s (%s)", problem, _REPLACEMENTS[problem.op])


def without_missing(config: Mapping[str, Any], accelerator: str) -> dict[str, Any]:
    """The config with torch's Adam in the place of DeepSpeed's when that one cannot be had; a copy.

    Args:
        config: A resolved config that :func:`refuse_missing` let pass.
        accelerator: ``"cpu"`` or ``"cuda"``.
    """
    replaced = copy.deepcopy(dict(config))
    missing = {problem.op for problem in check_ops(required_ops(config, accelerator))}
    if not missing & {"cpu_adam", "fused_adam"}:
        return replaced
    if "cpu_adam" in missing:
        replaced["zero_force_ds_cpu_optimizer"] = False
    if "optimizer" in replaced:
        written = replaced["optimizer"].get("params") or {}
        # DeepSpeed's Adam decays nothing unless told, torch's AdamW does
        replaced["optimizer"]["params"] = {"weight_decay": 0.0, **written, "torch_adam": True}
    return replaced


def build_ops(names: Iterable[str], *, local_rank: int) -> None:
    """Compiles and loads ops, so that no rank has to wait for one later; each is compiled once on each host.

    Ops that cannot be had and that something replaces are left out.

    Args:
        names: Names of ops, as :func:`required_ops` gives them.
        local_rank: This rank's number on its host; rank 0 says what takes long.

    Raises:
        ConfigError: An op that nothing can replace cannot be had.
    """
    from lightning_zero._compat.deepspeed_ops import give_up_op

    names = tuple(names)
    problems = check_ops(names)
    _refuse(problems)
    missing = {problem.op for problem in problems}
    if SHARED_MEMORY in missing:
        give_up_op(SHARED_MEMORY)
    for name in names:
        if name not in missing:
            _build(name, say=local_rank == 0)


def _build(name: str, *, say: bool) -> None:
    from lightning_zero._compat.deepspeed_ops import op_builder, was_installed_with_deepspeed

    builder = op_builder(name)
    assert builder is not None, name
    with environment({"PATH": _path_with_ninja()}):
        if was_installed_with_deepspeed(name):
            builder.load(verbose=False)
            return
        folder = extension_folder(name)
        turn = folder.with_name(f"{name}.turn")
        with build_turn(turn, say=say):
            interrupted = pass_lock(folder / LOCK)
            if interrupted or turn.read_text() != _releases() or not _library(name).exists():
                with _saying_so(name, folder):
                    builder.load(verbose=False)
                turn.write_text(_releases())
                return
        # Nothing to compile, so ranks need not wait for each other; unless sources have been installed anew.
        with _saying_so(name, folder) if say else nullcontext():
            builder.load(verbose=False)


def _releases() -> str:
    """The releases for which an op is compiled."""
    import deepspeed
    import torch

    return f"deepspeed {deepspeed.__version__}, torch {torch.__version__}\n"


def _library(name: str) -> Path:
    return extension_folder(name) / f"{name}.so"


@contextmanager
def _saying_so(name: str, folder: Path) -> Iterator[None]:
    """Says that an op is being compiled, once that has taken a few seconds."""
    line = "compiling DeepSpeed's %s in %s, once on this host; this takes up to some minutes"
    started = time.monotonic()
    timer = threading.Timer(SAY_AFTER, _log.warning, (line, name, folder))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if time.monotonic() - started > SAY_AFTER:
        _log.warning("compiled DeepSpeed's %s in %.0f s", name, time.monotonic() - started)


def _refuse(problems: Iterable[OpProblem]) -> None:
    fatal = [str(problem) for problem in problems if problem.op not in _REPLACEMENTS]
    if fatal:
        raise ConfigError("\n".join(fatal))


def _offload_device(config: Mapping[str, Any], section: str) -> str | None:
    zero = config.get("zero_optimization") or {}
    device = (zero.get(section) or {}).get("device")
    return device if zero.get("stage", 0) > 0 and device in _OFFLOAD_DEVICES else None


def _optimizer_op(config: Mapping[str, Any]) -> str | None:
    offloaded = _offload_device(config, "offload_optimizer") is not None
    section = config.get("optimizer")
    if section is None:  # the optimizer comes from code
        return "cpu_adam" if wants_cpu_optimizer(config) else None
    if (section.get("params") or {}).get("torch_adam"):
        return None
    on_host, on_device = _OPTIMIZER_OPS.get(str(section.get("type")).lower(), (None, None))
    return on_host if offloaded else on_device


def _is_built(name: str) -> bool:
    """Whether nothing needs to be compiled; for async_io DeepSpeed compiles a test program at every load."""
    from lightning_zero._compat.deepspeed_ops import was_installed_with_deepspeed

    return was_installed_with_deepspeed(name) or (name != "async_io" and _library(name).exists())


# Each check answers with (what is missing, what to do) or None.

_Finding = tuple[str, str] | None


def _no_such_op(name: str) -> _Finding:
    from lightning_zero._compat.deepspeed_ops import op_builder

    if op_builder(name) is None:
        return "DeepSpeed has none for this accelerator", "Choose another optimizer type, e.g. 'AdamW'."
    return None


def _no_compiler(name: str) -> _Finding:
    compiler = _compiler()
    if shutil.which(compiler[0]) is None:
        return f"there is no C++ compiler ({compiler[0]!r} is not on PATH)", _install("g++", "gcc-c++")
    return None


def _no_python_headers(name: str) -> _Finding:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return None if header.exists() else (f"{header} is not there", _install("python3-dev", "python3-devel"))


def _no_ninja(name: str) -> _Finding:
    if shutil.which("ninja", path=_path_with_ninja()) is None:
        return "there is no ninja", "Run: pip install ninja"
    return None


def _no_cuda_toolkit(name: str) -> _Finding:
    from torch.utils import cpp_extension
    from torch.version import cuda

    if name in _COMPILED_FOR_CUDA and cuda and _builds_for_cuda(name) and cpp_extension.CUDA_HOME is None:
        return "there is no CUDA toolkit (nvcc)", f"Install CUDA {cuda} with its compiler and set CUDA_HOME to it."
    return None


def _no_libaio(name: str) -> _Finding:
    if name != "async_io":
        return None
    flags = shlex.split(os.environ.get("CFLAGS", "")), shlex.split(os.environ.get("LDFLAGS", ""))
    program = "#include <libaio.h>\nint main() { return io_submit(nullptr, 0, nullptr); }\n"
    command = [*_compiler(), *flags[0], "-x", "c++", "-", *flags[1], "-laio", "-o", os.devnull]
    if subprocess.run(command, input=program, text=True, capture_output=True, check=False).returncode == 0:
        return None
    return "libaio and its headers are not there", _install("libaio-dev", "libaio-devel")


_CHECKS: tuple[Callable[[str], _Finding], ...] = (
    _no_such_op,
    _no_compiler,
    _no_python_headers,
    _no_ninja,
    _no_cuda_toolkit,
    _no_libaio,
)


def _builds_for_cuda(name: str) -> bool:
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().device_name() == "cuda")


def _compiler() -> list[str]:
    """The command that torch compiles with."""
    return shlex.split(os.environ.get("CXX") or "c++")


def _install(debian: str, fedora: str) -> str:
    if shutil.which("dnf"):
        return f"Run: dnf install {fedora}"
    return f"Run: apt-get install {debian}"


def _path_with_ninja() -> str:
    """``PATH``, led by the ninja of its wheel, whose script is not on it when a venv's python is called by its path.

    A system's ninja of another release would take what this one has built for stale, and compile it again each time.
    """
    path = os.environ.get("PATH", os.defpath)
    try:
        import ninja
    except ModuleNotFoundError:
        return path
    return os.pathsep.join((ninja.BIN_DIR, path))
