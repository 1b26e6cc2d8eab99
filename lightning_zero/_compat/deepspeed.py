"""DeepSpeed's undocumented names, each with what it is, why it is needed and where it was last seen (0.19.8)."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch import distributed as dist
from torch.nn import Module, Parameter

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# ``Init._convert_to_deepspeed_param`` hangs these on a parameter besides those that begin with ``ds_``. A parameter
# that is to be an ordinary one again must lose them, since ``hasattr(p, "ds_id")`` decides in many places.
_PARAMETER_ATTRIBUTES = (
    "aligned_size",
    "all_gather",
    "all_gather_coalesced",
    "convert_to_zero_parameters",
    "is_external_param",
    "item",
    "nvme_swapper",
    "padding_size",
    "partition",
    "partition_gradients",
    "partition_numel",
    "reduce_gradients_at_owner",
)


# ``DeepSpeedZeRoOffload._register_deepspeed_module`` keeps these on each module and does not make them again when they
# are there, so that a second engine would run its backward through the first one's coordinator.
_MODULE_ATTRIBUTES = (
    "applied_pre_backward_ref_cnt",
    "ds_grads_remaining",
    "ds_id",
    "ds_inflight_param_registry",
    "post_bwd_fn",
    "pre_bwd_fn",
)


def forget_partitioning(parameter: Parameter) -> None:
    """Takes everything that ``zero.Init`` hung on a parameter off it again; its data must be whole."""
    for name in list(vars(parameter)):
        if name.startswith("ds_") or name in _PARAMETER_ATTRIBUTES:
            delattr(parameter, name)


def restore_parameter_dicts(module: Module) -> None:
    """Undoes ``parameter_offload._inject_parameters``, which swaps each module's ``_parameters`` for a subclass."""
    for child in module.modules():
        if isinstance(child._parameters, OrderedDict):  # torch's own are plain dicts
            child._parameters = dict(child._parameters)
        vars(child).pop("_original_parameters", None)


@contextmanager
def suspended_init() -> Iterator[None]:
    """``zero.Init`` does nothing to what is built inside, and goes on afterwards.

    DeepSpeed has the two halves, ``shutdown_init_context`` and ``restore_init_context``, for the same end: an engine
    started inside ``zero.Init``. The second patches once more what was never unpatched, hence the look at ``patched``.
    """
    from deepspeed.runtime.zero import partition_parameters

    active = partition_parameters.top_level_context
    if active is None or not active.patched:
        yield
        return
    partition_parameters.shutdown_init_context()
    try:
        yield
    finally:
        partition_parameters.restore_init_context()


def detach_engine(engine: DeepSpeedEngine) -> None:
    """Cuts what keeps an ended engine and its buffers alive: parameters and the module refer to its optimizer.

    ``destroy`` leaves the engine's own two hooks, stage 3's back reference ``_z3_optimizer`` on each parameter, and the
    hook by which the optimizer calls the engine.
    """
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    if hasattr(engine.optimizer, "unregister_grad_acc_post_hooks"):
        engine.optimizer.unregister_grad_acc_post_hooks()
    for parameter in engine.module.parameters():
        parameter.grad = None
        vars(parameter).pop("_z3_optimizer", None)
        vars(parameter).pop("_hp_mapping", None)  # `destroy` sets it to None, by which a weight reads as zeros
    children = list(engine.module.modules())
    for child in children:
        for name in _MODULE_ATTRIBUTES:
            vars(child).pop(name, None)
        if hasattr(child._parameters, "_in_forward"):  # still true when an exception left the forward
            child._parameters._in_forward = False
    _forget_forward(children)
    engine.optimizer = engine.basic_optimizer = engine.lr_scheduler = None


def _forget_forward(modules: list[Module]) -> None:
    """Takes modules off stage 3's process-wide stack of forwards, where engines and exceptions leave them."""
    from deepspeed.runtime.zero import parameter_offload

    ended = set(modules)
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module not in ended]


def reset_once_a_step(engine: DeepSpeedEngine) -> None:
    """Lets stage 3 begin a step at the outermost forward of the module alone.

    It begins one at every forward of the root module, and ``self(batch)`` inside a ``training_step`` is one: the trace
    of the parameters' order would never be complete, and nothing would be fetched ahead.
    """
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    if not hasattr(offload, "fwd_pre_hook"):
        return
    depth = 0

    def enter(module: Module, *_: Any) -> None:
        nonlocal depth
        if depth == 0:
            offload.get_param_coordinator().reset_step()
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    offload.fwd_pre_hook.remove()
    # `destroy` removes what stands under these two names.
    offload.fwd_pre_hook = engine.module.register_forward_pre_hook(enter, prepend=True)
    offload.forward_hooks.append(engine.module.register_forward_hook(leave, always_call=True))


def set_clipping(engine: DeepSpeedEngine, max_norm: float) -> None:
    """Sets the norm that the next ``engine.step()`` clips to; DeepSpeed reads it from the config once otherwise.

    ZeRO and 16-bit optimizers keep it as ``clip_grad``; the engine's config serves stage 0 in fp32.
    """
    engine._config.gradient_clipping = max_norm
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = max_norm


def begin_backward(engine: DeepSpeedEngine) -> None:
    """Says that a new backward starts, for loops that run several inside one forward of the engine.

    The engine says it at each forward. Without it, stage 3 takes the second backward for another phase of the first
    and overwrites its gradients.
    """
    if hasattr(engine.optimizer, "clear_backward_seen_flag"):
        engine.optimizer.clear_backward_seen_flag()


@contextmanager
def foreign_backward(engine: DeepSpeedEngine) -> Iterator[None]:
    """Gradients reach an engine inside by another engine's backward pass, which does not end it.

    By itself an engine refuses that at stage 0, and above it takes several forwards before the backward pass for an
    interrupted one. While ``_running_engine_backward`` is set it leaves the end to whoever started, by
    :func:`end_foreign_backward`.
    """
    engine._running_engine_backward_count += 1
    engine._running_engine_backward = True
    try:
        yield
    finally:
        engine._running_engine_backward_count -= 1
        engine._running_engine_backward = engine._running_engine_backward_count > 0


def end_foreign_backward(engine: DeepSpeedEngine) -> None:
    """Reduces the gradients that have reached an engine in :func:`foreign_backward`, as ``engine.backward`` does."""
    engine._backward_epilogue()


def leave_backward(engine: DeepSpeedEngine) -> None:
    """Says that no backward pass is running any more.

    Every forward whose outputs it has gone through has entered it once, and ``engine.backward`` leaves once.
    """
    while getattr(engine.optimizer, "_backward_active_depth", 0) > 0:
        engine.optimizer.exit_backward()


def keeps_gradient_norm(engine: DeepSpeedEngine) -> bool:
    """Whether ``get_global_grad_norm`` tells the norm before clipping; at stage 0 in fp32, the engine forgets it."""
    return bool(engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled())


def clear_gradients(engine: DeepSpeedEngine) -> None:
    """Drops every gradient that an engine holds, reduced or not, so that the next window starts from nothing.

    ``optimizer.zero_grad()`` alone leaves what stages 1-3 have already reduced: stage 2 would add it to the next
    update, and so would stage 3 for parameters that the next window does not use.
    """
    optimizer = engine.optimizer
    optimizer.zero_grad(set_to_none=True)
    engine.zero_grad()
    engine._unmanaged_backward_count = 0
    if hasattr(optimizer, "bit16_groups") and hasattr(optimizer, "averaged_gradients"):
        _clear_stage_1_and_2(optimizer)
    elif hasattr(optimizer, "grad_partitions_flat_buffer"):
        _clear_stage_3(optimizer)
    elif hasattr(optimizer, "clear_hp_grads"):  # BF16_Optimizer: bf16 at stage 1 with fp32 accumulation
        optimizer.clear_hp_grads()


def _clear_stage_1_and_2(optimizer: Any) -> None:
    optimizer.micro_step_id = -1  # INITIAL_MICRO_STEP_ID: the next backward copies instead of adding
    for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        for group in gradients:
            gradients[group] = None
    if optimizer.cpu_offload:
        optimizer._offload_accumulated_param_ids = set()
        optimizer.reset_cpu_buffers()
        for partition in optimizer.single_partition_of_fp32_groups:
            if partition.grad is not None:
                partition.grad.zero_()


def _clear_stage_3(optimizer: Any) -> None:
    optimizer.averaged_gradients = {}
    optimizer.norm_for_param_grads = {}
    optimizer._offload_boundary_param_ids.clear()
    if optimizer.grad_partitions_flat_buffer is not None:
        optimizer.grad_partitions_flat_buffer.zero_()
    if optimizer.offload_optimizer:
        for partition in optimizer.fp32_partitioned_groups_flat:
            if partition.grad is not None:
                partition.grad.zero_()


# Direct I/O moves whole blocks of this many bytes, from and to addresses that are multiples of it.
_IO_BLOCK = 512


def misread_gradients(engine: DeepSpeedEngine) -> list[str]:
    """Parameters whose gradients stage 3 would read back wrong from NVMe, by name.

    It writes each large gradient shard to a file of its own and reads it into its place in a flat buffer with direct
    I/O. Where that place is not a multiple of the block size, the read does not arrive and the update uses what was in
    memory before, without a word.
    """
    optimizer = engine.optimizer
    if not getattr(optimizer, "swap_optimizer", False):
        return []
    swapper = optimizer.optimizer_swapper
    wrong = []
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        group, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
        size = 4 * numel  # fp32
        swapped = optimizer._swappable_optimizer_subgroup(group) and size >= swapper.min_aio_bytes
        if swapped and 4 * offset % _IO_BLOCK:
            wrong.append(name)
    return wrong


def unsharded_masters(engine: DeepSpeedEngine) -> dict[Parameter, Tensor]:
    """The fp32 weights that ``FP16_UnfusedOptimizer`` keeps beside 16-bit ones at stage 0; else nothing."""
    groups = getattr(engine.optimizer, "fp16_groups", None), getattr(engine.optimizer, "fp32_groups", None)
    if groups[0] is None or groups[1] is None:
        return {}
    pairs = zip(groups[0], groups[1], strict=True)
    return {low: high for lows, highs in pairs for low, high in zip(lows, highs, strict=True)}


@contextmanager
def recording_writer(engine: DeepSpeedEngine) -> Iterator[list[BaseException]]:
    """Lets a save go on where this rank cannot write, so that the barriers inside it find every rank.

    DeepSpeed writes through ``engine.checkpoint_engine``, an object made to be exchanged.

    Args:
        engine: The engine that saves.

    Yields:
        What went wrong on this rank, in order.
    """
    failures: list[BaseException] = []
    writer = engine.checkpoint_engine
    engine.checkpoint_engine = _Recording(writer, failures)
    try:
        yield failures
    finally:
        engine.checkpoint_engine = writer


def unknown_swap_files(engine: DeepSpeedEngine, folder: Path) -> list[str]:
    """Swap files that this rank would read from a checkpoint and that are not there, by name.

    ``load_checkpoint`` copies the checkpoint's swap files beside the engine's and says nothing when their names differ,
    so that the initial weights stay. Names come from ``ds_id``, which counts all parameters that a process has made.

    Args:
        engine: The engine that is to load.
        folder: The checkpoint's tag folder.
    """
    optimizer = engine.optimizer
    if not getattr(optimizer, "swap_optimizer", False):
        return []
    groups = enumerate(optimizer.fp32_partitioned_groups_flat)
    names = [f"{flat.ds_id}.tensor.swp" for group, flat in groups if optimizer._swappable_optimizer_subgroup(group)]
    there = folder / "offloaded_tensors" / f"rank{dist.get_rank():02d}"
    return [name for name in names if not (there / name).is_file()]


def forget_shared_memory() -> None:
    """Takes the name of this rank's buffer for shared-memory collectives away, once all ranks have it. Collective.

    ``shm_initialize`` (``csrc/cpu/comm/shm.cpp``) makes a buffer of 66 MB for each rank of a host on CPU. Its name
    outlives a process that is killed, and with it the memory; without a name it ends with the last process that has it.
    """
    from deepspeed.comm import comm

    if getattr(comm.cdb, "shm_comm_op", None) is None:
        return
    dist.barrier()
    where = f"{os.environ.get('MASTER_ADDR', '')}_{os.environ.get('MASTER_PORT', '')}"
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{where}_{dist.get_rank()}"
    Path("/dev", "shm", name).unlink(missing_ok=True)  # where glibc's shm_open keeps it


def end_failed_save(engine: DeepSpeedEngine) -> None:
    """Does what ``save_checkpoint`` still owes the other ranks when it could not copy this rank's swap files.

    That copy is the only writing that does not go through the engine's writer; a collective and a barrier follow it.
    """
    if engine._optimizer_has_ckpt_event_epilogue():
        engine.optimizer.checkpoint_event_epilogue()
    dist.barrier()


class _Recording:
    """A DeepSpeed checkpoint engine whose failures are kept instead of raised."""

    def __init__(self, writer: Any, failures: list[BaseException]) -> None:
        self._writer = writer
        self._failures = failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        try:
            self._writer.makedirs(path, exist_ok=exist_ok)
        except OSError as failure:
            self._failures.append(failure)

    def save(self, state_dict: Any, path: str) -> None:
        if self._failures:
            return
        try:
            self._writer.save(state_dict, path)
        except RuntimeError as failure:
            if "inline_container" not in str(failure):
                raise
            self._failures.append(OSError(f"{path} could not be written, is the disk full? torch says: {failure}"))
        except (OSError, pickle.PicklingError, AttributeError, TypeError) as failure:
            self._failures.append(failure)
