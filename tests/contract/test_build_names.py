"""The private names around ops that are compiled at first use: torch's build folder and lock, DeepSpeed's builders."""

import os
from pathlib import Path

import pytest
from torch.utils import file_baton

from lightning_zero._compat import torch_extensions
from tests.harness import ranks


def test_torch_build_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`cpp_extension._get_build_directory` names and makes the folder in which `load` builds."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert torch_extensions.extension_folder("some_op") == tmp_path / "some_op"
    assert (tmp_path / "some_op").is_dir()


def test_torch_lock_is_open_while_it_is_held(tmp_path: Path) -> None:
    """`FileBaton` keeps its file open until it removes it: by this a live holder is told from a dead one."""
    lock = tmp_path / torch_extensions.LOCK
    baton = file_baton.FileBaton(str(lock))
    assert baton.try_acquire()
    assert os.path.samestat(os.fstat(baton.fd), lock.stat())
    baton.release()
    assert not lock.exists()


@ranks(1)
@pytest.mark.parametrize(
    "name", ["async_io", "cpu_adagrad", "cpu_adam", "cpu_lion", "deepspeed_shm_comm", "fused_adam", "pin_memory"]
)
def test_deepspeed_op_builders(name: str) -> None:
    """The accelerator's `create_op_builder` gives a builder of that name, whose `load` takes `verbose`."""
    from lightning_zero._compat import deepspeed_ops

    builder = deepspeed_ops.op_builder(name)
    assert builder is not None
    assert builder.name == name
    assert builder.is_compatible(verbose=False) in (True, False)
    assert deepspeed_ops.was_installed_with_deepspeed(name) is False


@ranks(1)
def test_deepspeed_op_that_the_accelerator_lacks() -> None:
    """An op that exists for GPUs only has no builder on CPU."""
    from lightning_zero._compat import deepspeed_ops

    assert deepspeed_ops.op_builder("fused_lamb") is None


@ranks(2)
def test_deepspeed_gives_up_an_op() -> None:
    """An entry in `deepspeed.ops.__compatible_ops__` keeps `init_distributed` from building the shared-memory op."""
    import deepspeed
    from deepspeed import comm

    from lightning_zero._compat import deepspeed_ops

    deepspeed_ops.give_up_op("deepspeed_shm_comm")
    deepspeed.init_distributed("gloo")
    assert comm.comm.cdb.shm_comm_op is None
