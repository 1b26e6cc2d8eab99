"""DeepSpeed's undocumented names, held on real engines to what `_compat` takes them for."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import ranks

STAGES = [1, 2, 3]
OFFLOADED = [(stage, offload) for stage in STAGES for offload in (False, True)]
BF16 = {"bf16": {"enabled": True}}
FP32_ACCUMULATION = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))


def engine(stage: int, *, offload: bool = False, born_sharded: bool = False, **more: Any) -> Any:
    """DeepSpeed's engine around a small network, by DeepSpeed's own calls."""
    import deepspeed

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    zero: dict[str, Any] = {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **more,
    }
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=born_sharded):
        module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    made, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, model_parameters=list(module.parameters()), config=config
    )
    return made


def backward(made: Any) -> None:
    rows = torch.ones(2, 5, dtype=next(made.module.parameters()).dtype)
    made.backward(made(rows).float().pow(2).mean())


def names(thing: Any) -> set[str]:
    return set(vars(thing))


# What `zero.Init` and stage 3 leave on parameters and modules


@pytest.mark.parametrize("born_sharded", [False, True])
@ranks(1)
def test_attributes_that_stage_3_hangs_on_parameters(born_sharded: bool) -> None:
    """`_PARAMETER_ATTRIBUTES`, `_z3_optimizer` and `ds_*` are all that a parameter of a stage-3 engine has."""
    from lightning_zero._compat.deepspeed import _PARAMETER_ATTRIBUTES, forget_partitioning

    made = engine(3, born_sharded=born_sharded)
    backward(made)
    for parameter in made.module.parameters():
        found = {name for name in names(parameter) if not name.startswith("ds_")}
        assert found == {*_PARAMETER_ATTRIBUTES, "_z3_optimizer"}
        assert parameter.ds_numel == parameter.ds_shape.numel()
        forget_partitioning(parameter)
        assert not {name for name in names(parameter) if name != "_z3_optimizer"}
        assert not hasattr(parameter, "ds_id")


@ranks(1)
def test_attributes_that_stage_3_hangs_on_modules() -> None:
    """`_MODULE_ATTRIBUTES` and five harmless ones are all that stage 3 adds to a module."""
    from lightning_zero._compat.deepspeed import _MODULE_ATTRIBUTES

    harmless = {
        "_external_params",
        "_original_parameters",
        "all_parameters",
        "ds_external_parameters",
        "ds_recompute_parameters",
    }
    made = engine(3)
    backward(made)
    plain = network()
    pairs = zip(made.module.modules(), plain.modules(), strict=True)
    added = set().union(*(names(module) - names(other) for module, other in pairs))
    assert added == {*_MODULE_ATTRIBUTES, *harmless}


@ranks(1)
def test_parameter_dictionaries_are_swapped() -> None:
    """Stage 3 puts an `OrderedDict` with `_in_forward` in the place of each module's `_parameters`."""
    from lightning_zero._compat.deepspeed import restore_parameter_dicts

    made = engine(3)
    for module in made.module.modules():
        assert isinstance(module._parameters, OrderedDict)
        assert module._parameters._in_forward is False  # type: ignore[attr-defined]
        assert "_original_parameters" in names(module)
    restore_parameter_dicts(made.module)
    for module in made.module.modules():
        assert type(module._parameters) is dict


@ranks(1)
def test_stack_of_forwards() -> None:
    """`parameter_offload.FWD_MODULE_STACK` is the list of the modules that are in their forward."""
    from deepspeed.runtime.zero import parameter_offload

    made = engine(3)
    seen = []
    made.module[1].register_forward_hook(lambda *_: seen.extend(parameter_offload.FWD_MODULE_STACK))
    backward(made)
    assert made.module in seen
    assert isinstance(parameter_offload.FWD_MODULE_STACK, list)


@pytest.mark.parametrize("stage", STAGES)
@ranks(1)
def test_detached_engine_can_be_freed(stage: int) -> None:
    """Without its two hooks and back references a destroyed engine is garbage, and its module trains in plain torch."""
    import gc
    import weakref

    from lightning_zero._compat.deepspeed import detach_engine

    made = engine(stage)
    backward(made)
    made.step()
    assert made.module_forward_pre_hook is not None
    assert made.module_forward_post_hook is not None
    assert hasattr(made.optimizer, "unregister_grad_acc_post_hooks") or stage == 3
    module, dying = made.module, weakref.ref(made.optimizer)
    made.destroy()
    detach_engine(made)
    del made
    gc.collect()
    assert dying() is None
    assert not any("_z3_optimizer" in names(parameter) for parameter in module.parameters())


# What a window needs


@pytest.mark.parametrize(("stage", "offload"), OFFLOADED)
@ranks(1)
def test_clipping_is_read_at_the_step(stage: int, offload: bool) -> None:
    """`clip_grad` and `_config.gradient_clipping` limit the next step: with SGD it is as long as lr x norm."""
    from lightning_zero._compat.deepspeed import set_clipping

    made = engine(stage, offload=offload)
    assert hasattr(made.optimizer, "clip_grad")
    assert made.get_global_grad_norm() is None
    before = _whole(made)
    backward(made)
    set_clipping(made, 0.01)
    made.step()
    moved = torch.cat([(new - old).flatten() for new, old in zip(_whole(made), before, strict=True)])
    norm = made.get_global_grad_norm()
    assert norm is not None
    assert norm > 0.02
    assert moved.norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)
    assert made._config.gradient_clipping == 0.01


def _whole(made: Any) -> list[torch.Tensor]:
    import deepspeed

    parameters = list(made.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("stage", STAGES)
@ranks(1)
def test_backward_seen_flag(stage: int) -> None:
    """Every ZeRO optimizer has `clear_backward_seen_flag`, which `begin_backward` calls."""
    from lightning_zero._compat.deepspeed import begin_backward

    made = engine(stage)
    backward(made)
    assert made.optimizer.clear_backward_seen_flag() is None
    begin_backward(made)


@pytest.mark.parametrize(("stage", "offload"), OFFLOADED)
@ranks(1)
def test_cleared_gradients_leave_nothing(stage: int, offload: bool) -> None:
    """After `clear_gradients` a backward and a step make the update that they make on a fresh engine."""
    from lightning_zero._compat.deepspeed import clear_gradients

    fresh = engine(stage, offload=offload)
    backward(fresh)
    fresh.step()
    expected = _whole(fresh)

    made = engine(stage, offload=offload)
    made.set_gradient_accumulation_boundary(False)
    backward(made)
    backward(made)
    assert made._unmanaged_backward_count == 0
    clear_gradients(made)
    made.set_gradient_accumulation_boundary(True)
    backward(made)
    made.step()
    for actual, wanted in zip(_whole(made), expected, strict=True):
        assert torch.allclose(actual, wanted, atol=1e-7)


@pytest.mark.parametrize("stage", [1, 2])
@ranks(1)
def test_names_of_stages_1_and_2(stage: int) -> None:
    """What `_clear_stage_1_and_2` resets is there, under these names and of these kinds."""
    from deepspeed.runtime.zero import stage_1_and_2

    optimizer = engine(stage, offload=True).optimizer
    assert stage_1_and_2.INITIAL_MICRO_STEP_ID == -1
    assert isinstance(optimizer.micro_step_id, int)
    assert isinstance(optimizer.averaged_gradients, dict)
    assert isinstance(optimizer.all_grad_tensors, dict)
    assert isinstance(optimizer.bit16_groups, list)
    assert isinstance(optimizer.single_partition_of_fp32_groups, list)
    assert isinstance(optimizer._offload_accumulated_param_ids, set)
    assert optimizer.cpu_offload
    assert callable(optimizer.reset_cpu_buffers)


@ranks(1)
def test_names_of_stage_3() -> None:
    """What `_clear_stage_3` and `misread_gradients` read is there, under these names and of these kinds."""
    optimizer = engine(3, offload=True).optimizer
    assert isinstance(optimizer.averaged_gradients, dict)
    assert isinstance(optimizer.norm_for_param_grads, dict)
    assert isinstance(optimizer._offload_boundary_param_ids, set)
    assert optimizer.grad_partitions_flat_buffer is None or torch.is_tensor(optimizer.grad_partitions_flat_buffer)
    assert isinstance(optimizer.fp32_partitioned_groups_flat, list)
    assert optimizer.offload_optimizer
    assert optimizer.swap_optimizer is False
    assert optimizer._swappable_optimizer_subgroup(0) is False


@ranks(2)
def test_grad_position() -> None:
    """`grad_position` says group, offset and length of each parameter's shard in the group's flat buffer."""
    optimizer = engine(3).optimizer
    offset = 0
    for parameter in optimizer.fp16_groups[0]:
        shard = -(-parameter.ds_numel // 2)
        assert list(optimizer.grad_position[optimizer.get_param_id(parameter)]) == [0, offset, shard]
        offset += shard


def test_swapper_has_a_smallest_size() -> None:
    """`OptimizerSwapper.min_aio_bytes` is the size from which a shard is swapped."""
    from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper

    source = inspect.getsource(OptimizerSwapper)
    assert "self.min_aio_bytes = " in source
    assert "self.min_aio_bytes <= " in source


@ranks(1)
def test_bf16_with_fp32_accumulation_has_its_own_optimizer() -> None:
    """`BF16_Optimizer.clear_hp_grads` zeroes the gradients that it has added up in fp32."""
    optimizer = engine(1, **FP32_ACCUMULATION).optimizer
    assert not hasattr(optimizer, "bit16_groups") or not hasattr(optimizer, "averaged_gradients")
    for gradients in optimizer.fp32_groups_gradients_flat:
        gradients.fill_(1)
    optimizer.clear_hp_grads()
    assert all(not gradients.any() for gradients in optimizer.fp32_groups_gradients_flat)


# Where the fp32 weights are


@ranks(1)
def test_masters_of_stage_0() -> None:
    """`FP16_UnfusedOptimizer` pairs `fp16_groups` with `fp32_groups`, the weights in fp32."""
    from lightning_zero._compat.deepspeed import unsharded_masters

    made = engine(0, **BF16)
    masters = unsharded_masters(made)
    assert set(masters) == set(made.module.parameters())
    for parameter, expected in zip(made.module.parameters(), network().parameters(), strict=True):
        assert masters[parameter].dtype == torch.float32
        assert torch.equal(masters[parameter], expected.bfloat16().float())


@pytest.mark.parametrize("case", ["1", "2", "3", "1 with fp32 accumulation"])
@ranks(2)
def test_own_part_of_the_masters(case: str) -> None:
    """The parts that two ranks find by `own_masters` make up the whole fp32 weights, none twice."""
    from lightning_zero._compat.deepspeed_masters import own_masters

    made = engine(int(case[0]), **(FP32_ACCUMULATION if "fp32" in case else BF16))
    assert all(hasattr(parameter, "_hp_mapping") for parameter in made.module.parameters()) is (case[0] != "3")
    masters = own_masters(made.optimizer)
    parameters = list(made.module.parameters())
    assert set(masters) == set(parameters)
    for parameter, expected in zip(parameters, network().parameters(), strict=True):
        parts: list[Any] = [None, None]
        first, values = masters[parameter]()
        dist.all_gather_object(parts, (first, values.clone()))
        whole = torch.full((expected.numel(),), float("nan"))
        for begin, elements in parts:
            elements = elements[: max(0, expected.numel() - begin)]  # a shard may end in padding
            assert whole[begin : begin + elements.numel()].isnan().all()
            whole[begin : begin + elements.numel()] = elements
        assert torch.equal(whole, expected.detach().bfloat16().float().flatten())


# What the norms of gradients need


@pytest.mark.parametrize(("stage", "offload"), OFFLOADED)
@ranks(2)
def test_own_gradients(stage: int, offload: bool) -> None:
    """`safe_get_local_grad`, and `_hp_mapping` with `_index_in_param_group`, give parts that make up the gradients."""
    from lightning_zero._compat.deepspeed_gradients import is_spread, own_gradient

    plain = network()
    plain(torch.ones(2, 5)).pow(2).mean().backward()
    expected = sum(float(p.grad.square().sum()) for p in plain.parameters() if p.grad is not None)
    made = engine(stage, offload=offload)
    backward(made)
    own = torch.zeros(1)
    for parameter in made.module.parameters():
        assert is_spread(parameter)
        part = own_gradient(parameter)
        own += 0 if part is None else part.square().sum()
    dist.all_reduce(own)
    assert own.item() == pytest.approx(expected, rel=1e-5)
    assert made.get_global_grad_norm() in (None, 0.0)
    made.step()
    assert float(made.get_global_grad_norm()) == pytest.approx(expected**0.5, rel=1e-5)


@ranks(2)
def test_own_gradients_of_the_bf16_optimizer() -> None:
    """`BF16_Optimizer` keeps whole gradients, of which `_hp_mapping.lp_fragment_address` is this rank's part."""
    from lightning_zero._compat.deepspeed_gradients import own_gradient

    made = engine(1, **FP32_ACCUMULATION)
    backward(made)
    squares = [own_gradient(parameter) for parameter in made.module.parameters()]
    own = torch.tensor(sum(float(part.float().square().sum()) for part in squares if part is not None))
    dist.all_reduce(own)
    made.step()
    assert float(made.get_global_grad_norm()) == pytest.approx(own.item() ** 0.5, rel=1e-4)


@ranks(1)
def test_loss_scale() -> None:
    """`_get_optimizer_loss_scale` reads the scale from wherever an optimizer keeps it."""
    from lightning_zero._compat.deepspeed_gradients import loss_scale

    made = engine(2)
    assert loss_scale(made) is None, "without fp16 there is none"
    assert made._get_optimizer_loss_scale() == made.optimizer.loss_scale


# What a save needs


@ranks(1)
def test_writer_can_be_exchanged(tmp_path: Path) -> None:
    """`save_checkpoint` writes by `engine.checkpoint_engine`'s `makedirs(path, exist_ok)` and `save(state, path)`."""
    from lightning_zero._compat.deepspeed import recording_writer

    made = engine(2)
    writer = made.checkpoint_engine
    (tmp_path / "tag" / "mp_rank_00_model_states.pt").mkdir(parents=True)  # so that this file cannot be written
    with recording_writer(made) as failures:
        made.save_checkpoint(str(tmp_path), tag="tag", save_latest=False)
    assert len(failures) == 1
    assert "Is a directory" in str(failures[0])
    assert list((tmp_path / "tag").iterdir()) == [tmp_path / "tag" / "mp_rank_00_model_states.pt"]
    assert made.checkpoint_engine is writer
    assert list(inspect.signature(writer.makedirs).parameters)[:2] == ["path", "exist_ok"]
    assert list(inspect.signature(writer.save).parameters)[:2] == ["state_dict", "path"]


@pytest.mark.parametrize("stage", STAGES)
@ranks(1)
def test_end_of_a_save(stage: int) -> None:
    """`_optimizer_has_ckpt_event_epilogue` says whether there is a `checkpoint_event_epilogue`: at stage 3."""
    made = engine(stage)
    assert made._optimizer_has_ckpt_event_epilogue() is (stage == 3)
    assert hasattr(made.optimizer, "checkpoint_event_epilogue") is (stage == 3)


# How stage 3 knows where a step begins


@ranks(1)
def test_hooks_of_stage_3() -> None:
    """`parameter_offload.fwd_pre_hook` begins a step by the coordinator's `reset_step`; `forward_hooks` is a list."""
    from lightning_zero._compat.deepspeed import reset_once_a_step

    made = engine(3)
    offload = made.optimizer.parameter_offload
    assert isinstance(offload.forward_hooks, list)
    begun = []
    coordinator = offload.get_param_coordinator()
    reset = coordinator.reset_step
    coordinator.reset_step = lambda: (begun.append(1), reset())
    made.module(torch.ones(2, 5))
    assert begun == [1], "the root module's forward begins a step"
    reset_once_a_step(made)
    made.module(torch.ones(2, 5))
    assert begun == [1, 1], "and so does the hook in its place, once"
