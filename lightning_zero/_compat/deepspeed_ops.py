"""DeepSpeed's undocumented names around the ops that it compiles at first use (0.19.8)."""

from __future__ import annotations

from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import accelerator_name, installed_ops

_BUILDERS = {
    "async_io": "AsyncIOBuilder",
    "cpu_adagrad": "CPUAdagradBuilder",
    "cpu_adam": "CPUAdamBuilder",
    "cpu_lion": "CPULionBuilder",
    "deepspeed_shm_comm": "ShareMemCommBuilder",
    "fused_adam": "FusedAdamBuilder",
    "fused_lamb": "FusedLambBuilder",
    "fused_lion": "FusedLionBuilder",
    "pin_memory": "PinMemoryBuilder",
}


def op_builder(name: str) -> Any | None:
    """DeepSpeed's builder of an op for the accelerator in use, or ``None`` when that one has no such op."""
    builder = get_accelerator().create_op_builder(_BUILDERS[name])
    # an accelerator without the op answers with a builder of another name, whose ``load`` raises
    return builder if builder is not None and builder.name == name else None


def was_installed_with_deepspeed(name: str) -> bool:
    """Whether the op was compiled when deepspeed was installed (``DS_BUILD_OPS=1``), so that nothing remains to do."""
    return bool(installed_ops.get(name)) and accelerator_name == get_accelerator().device_name()


def give_up_op(name: str) -> None:
    """Tells DeepSpeed that an optional op cannot be had here: ``init_distributed`` builds no shared-memory one then."""
    deepspeed.ops.__compatible_ops__[name] = False
