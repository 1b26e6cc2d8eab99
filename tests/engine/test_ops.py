"""DeepSpeed's ops: which a run needs, what is missing, and that each is compiled once on a host, come what may."""

import logging
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from lightning_zero.engine import ops
from lightning_zero.errors import ConfigError
from tests.harness import ranks, run_ranks

SHM = "deepspeed_shm_comm"
NO_TOOLS = {"PATH": "/nonexistent", "TORCH_EXTENSIONS_DIR": "empty"}  # a machine without compiler, an empty cache


def offloaded(device: str = "cpu", **more: Any) -> dict[str, Any]:
    """A config with the optimizer offloaded."""
    return {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": device}}, **more}


@pytest.mark.parametrize(
    ("config", "accelerator", "expected"),
    [
        ({"zero_optimization": {"stage": 3}}, "cpu", (SHM,)),
        ({"zero_optimization": {"stage": 3}}, "cuda", ()),
        (offloaded(), "cuda", ("cpu_adam",)),
        (offloaded(zero_force_ds_cpu_optimizer=False), "cuda", ()),
        (offloaded(optimizer={"type": "AdamW"}), "cuda", ("cpu_adam",)),
        (offloaded(optimizer={"type": "AdamW", "params": {"torch_adam": True}}), "cuda", ()),
        (offloaded(optimizer={"type": "Lion"}), "cuda", ("cpu_lion",)),
        (offloaded(optimizer={"type": "SGD"}), "cuda", ()),
        ({"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam"}}, "cuda", ("fused_adam",)),
        (offloaded("nvme"), "cpu", (SHM, "pin_memory", "async_io", "cpu_adam")),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "cuda", ("pin_memory", "async_io")),
        (offloaded("none"), "cuda", ()),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, "cuda", ()),
        ({}, "cuda", ()),
    ],
)
def test_required_ops(config: dict[str, Any], accelerator: str, expected: tuple[str, ...]) -> None:
    """The config and the accelerator decide which ops a run loads."""
    assert ops.required_ops(config, accelerator) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (offloaded(), True),
        (offloaded(zero_force_ds_cpu_optimizer=True), True),
        (offloaded(zero_force_ds_cpu_optimizer=False), False),
        ({"zero_optimization": {"stage": 3}}, False),
    ],
)
def test_wants_cpu_optimizer(config: dict[str, Any], expected: bool) -> None:
    """The flag counts only where the optimizer is offloaded, and absent means yes."""
    assert ops.wants_cpu_optimizer(config) is expected


@ranks(1, env=NO_TOOLS)
def test_a_missing_compiler_is_found() -> None:
    """Case O5: without a compiler every op that is not compiled yet is a problem with its reason and remedy."""
    (problem,) = ops.check_ops(["cpu_adam"])
    assert problem.op == "cpu_adam"
    assert "no C++ compiler" in problem.reason
    assert "install g" in problem.remedy


@ranks(1, env=NO_TOOLS)
def test_a_missing_compiler_is_an_error_where_nothing_replaces_the_op() -> None:
    """NVMe without its ops is refused, with a line for each of them; CPU Adam alone is not."""
    ops.refuse_missing(offloaded(), "cpu")
    with pytest.raises(ConfigError, match=r"pin_memory cannot be compiled.*\n.*async_io cannot be compiled"):
        ops.refuse_missing(offloaded("nvme"), "cpu")


@ranks(1, env={"CXX": "./c++-without-libaio"})
def test_missing_libaio_is_found() -> None:
    """Case R2: NVMe without libaio is told with the command that installs it."""
    wrap_compiler(Path("c++-without-libaio"), 'case "$*" in *-laio*) exit 1;; esac')
    assert ops.check_ops(["cpu_adam"]) == ()
    with pytest.raises(ConfigError, match=r"async_io cannot be compiled: libaio.*Run: .*install libaio-dev"):
        ops.refuse_missing(offloaded("nvme"), "cpu")


@ranks(1, env={"PATH": "bin", "TORCH_EXTENSIONS_DIR": "empty"})
def test_ninja_need_not_be_on_the_path() -> None:
    """A venv's python called by its path has no venv on PATH; ninja from its wheel is found all the same."""
    Path("bin").mkdir()
    Path("bin/c++").symlink_to("/usr/bin/c++")
    assert shutil.which("ninja") is None
    assert ops.check_ops(["cpu_adam"]) == ()


def test_a_systems_ninja_is_not_used(tmp_path: Path) -> None:
    """Another release of ninja, first on PATH, would take a compiled op for stale; the wheel's goes before it."""
    copy_from_cache(SHM, tmp_path / "cache")
    command = tmp_path / "bin" / "ninja"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\ntouch {tmp_path / 'used'}\nexit 1\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    path = f"{command.parent}:{os.environ['PATH']}"
    run_ranks(build_and_listen, 1, SHM, env={"TORCH_EXTENSIONS_DIR": str(tmp_path / "cache"), "PATH": path})
    assert not (tmp_path / "used").exists()


def test_a_compiled_op_needs_no_compiler(tmp_path: Path) -> None:
    """A machine that has the library in its cache is not asked for a compiler."""
    copy_from_cache(SHM, tmp_path)
    (found,) = run_ranks(ops.check_ops, 1, [SHM], env={**NO_TOOLS, "TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert found == ()


def test_training_without_a_compiler(tmp_path: Path) -> None:
    """Case O5: on a machine without a compiler offload trains with torch's AdamW, to the losses of CPU Adam."""
    section = {"type": "AdamW", "params": {"lr": 0.01}}
    config = offloaded(optimizer=section, train_micro_batch_size_per_gpu=8)
    with_compiler = run_ranks(train, 2, config)
    without = run_ranks(train, 2, config, env={**NO_TOOLS, "TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert [kind for kind, _ in with_compiler] == ["DeepSpeedCPUAdam"] * 2
    assert [kind for kind, _ in without] == ["AdamW"] * 2
    assert without[0][1] == pytest.approx(with_compiler[0][1], rel=1e-5)
    assert without[0][1][-1] < without[0][1][0]


def train(config: dict[str, Any]) -> tuple[str, list[float]]:
    """Name of the optimizer, and the losses of five updates."""
    import deepspeed
    import torch

    ops.refuse_missing(config, "cpu")
    ops.build_ops(ops.required_ops(config, "cpu"), local_rank=int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ops.without_missing(config, "cpu")
    )
    losses = []
    for _ in range(5):
        loss = (engine(torch.linspace(-1, 1, 32).reshape(8, 4)) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return type(engine.basic_optimizer).__name__, losses


def test_a_stale_lock_is_passed(tmp_path: Path) -> None:
    """Case R7: a lock that a killed process left is removed with a word, on every rank within seconds."""
    lock = copy_from_cache(SHM, tmp_path) / "lock"
    lock.touch()
    lines = run_ranks(build_and_listen, 2, SHM, timeout=20, env={"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert not lock.exists()
    assert sum(line.startswith(f"removing {lock}") for rank in lines for line in rank) == 1


# Compiling takes minutes on a small machine. This compiler notes the call and takes the object from another build; the
# rest is real: DeepSpeed, torch's lock, ninja, the linker.
_COUNT_AND_COPY = """
case "$*" in *" -c "*)
    echo compiled >> {count}
    while [ $# -gt 0 ]; do case "$1" in -o) object=$2;; -MF) dependencies=$2;; esac; shift; done
    sleep 4
    cp {objects}/$object $object
    echo "$object:" > $dependencies
    exit;;
esac
"""


def test_an_op_is_compiled_once_on_a_host(tmp_path: Path) -> None:
    """Ranks that start at once in an empty cache compile each source once; one line says that it takes long."""
    count = tmp_path / "count"
    objects = copy_from_cache(SHM, tmp_path / "other")
    wrap_compiler(tmp_path / "counting-c++", _COUNT_AND_COPY.format(count=count, objects=objects))
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "cache"), "CXX": str(tmp_path / "counting-c++")}
    lines = run_ranks(build_and_listen, 3, SHM, env=environment)
    assert count.read_text().split() == ["compiled"] * len(list(objects.glob("*.o")))
    assert sum(line.startswith(f"compiling DeepSpeed's {SHM}") for rank in lines for line in rank) == 1


def test_a_killed_build_is_built_anew(tmp_path: Path) -> None:
    """Case R7: after a kill in the middle of linking, the half-written library is not taken for a whole one."""
    folder = copy_from_cache(SHM, tmp_path)
    (folder / f"{SHM}.so").write_bytes(b"half a library")
    log = folder / ".ninja_log"  # in it are the finished steps only
    log.write_text("".join(line for line in log.read_text().splitlines(True) if ".so" not in line))
    (folder / "lock").touch()
    run_ranks(build_and_listen, 2, SHM, env={"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert (folder / f"{SHM}.so").stat().st_size > 10_000


def build_and_listen(name: str) -> list[str]:
    """Builds an op and returns what was logged meanwhile."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("lightning_zero").addHandler(Listener())
    ops.build_ops([name], local_rank=int(os.environ["LOCAL_RANK"]))
    from lightning_zero._compat.deepspeed_ops import op_builder

    builder = op_builder(name)
    assert builder is not None
    assert builder.load() is not None
    return lines


def copy_from_cache(name: str, cache: Path) -> Path:
    """Copies an op that the harness has compiled into another cache; ninja finds nothing to do there."""
    (folder,) = run_ranks(folder_of, 1, name)
    copy = shutil.copytree(folder, cache / name)
    return Path(copy)


def folder_of(name: str) -> Path:
    """The folder of an op in the real cache."""
    from lightning_zero._compat.torch_extensions import extension_folder

    return extension_folder(name)


def wrap_compiler(path: Path, before: str) -> None:
    """Writes a compiler that runs a line of shell first."""
    path.write_text(f'#!/bin/sh\n{before}\nexec c++ "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
