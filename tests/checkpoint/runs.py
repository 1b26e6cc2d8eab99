"""Tiny DeepSpeed runs that save a checkpoint, and what their live engines held when they did."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Variant:
    """What a model has that has gone wrong somewhere; every size is odd, so that partitions need padding."""

    tied: bool = False
    aliased: bool = False
    frozen: bool = False
    groups: bool = False
    buffers: bool = False
    empty: bool = False
    exclude_frozen: bool = False
    round_robin: bool = False
    offload: bool = False
    fp32_gradients: bool = False


VARIANTS = {
    "tied": Variant(tied=True),
    "aliased": Variant(aliased=True),
    "frozen": Variant(frozen=True),
    "groups": Variant(groups=True),
    "buffers": Variant(buffers=True),
    "empty": Variant(empty=True),
    "uneven": Variant(),
    "excluded": Variant(frozen=True, tied=True, exclude_frozen=True),
    "reordered": Variant(groups=True, round_robin=True),
    "offloaded": Variant(frozen=True, groups=True, offload=True),
    "fp32-gradients": Variant(groups=True, fp32_gradients=True),
    "everything": Variant(tied=True, aliased=True, frozen=True, groups=True, buffers=True),
}


class Net(nn.Module):
    """Embedding, frozen middle, block under one or two names, head."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        if variant.empty:
            self.none = nn.Parameter(torch.empty(0, 5))
            self.nothing = nn.Parameter(torch.empty(0, 3))
        self.middle = nn.Linear(5, 7)
        self.middle.requires_grad_(not variant.frozen)
        self.block = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5))
        if variant.aliased:
            self.again = self.block
        self.scale = nn.Parameter(torch.tensor([1.5]))  # DeepSpeed knows no parameters of no dimension
        self.head = nn.Linear(5, 11, bias=False)
        if variant.tied:
            self.head.weight = self.embed.weight
        if variant.buffers:
            self.stats = nn.BatchNorm1d(5, affine=False)
            self.register_buffer("flags", torch.tensor([True, False, True]))
            self.register_buffer("counts", torch.arange(3))
            self.register_buffer("other_counts", self.counts)
            self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.block(torch.tanh(self.middle(self.embed(tokens)))) * self.scale
        if hasattr(self, "stats"):
            with torch.no_grad():
                self.stats(hidden)
        result: Tensor = self.head(hidden)
        return result


@dataclass(frozen=True)
class Case:
    """One run: a variant at a stage and a precision."""

    variant: str
    stage: int
    precision: str

    def __str__(self) -> str:
        return f"{self.variant}-stage{self.stage}-{self.precision}"


def save_runs(folder: Path, cases: list[Case]) -> None:
    """Train each case for three steps and save it, with what the engine held; every rank calls it.

    Leaves ``<folder>/<case>/`` (the checkpoint) and ``<folder>/<case>.pt``: the live state dict with fp32 masters under
    ``expected``, and what DeepSpeed's own converter makes of the checkpoint under ``converted``.
    """
    import deepspeed

    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo")
    for case in cases:
        checkpoint = folder / str(case)
        expected = _train_and_save(VARIANTS[case.variant], case.stage, case.precision, checkpoint)
        if torch.distributed.get_rank() == 0:
            converted = _convert(checkpoint) if case.stage and case.variant != "fp32-gradients" else {}
            torch.save({"expected": expected, "converted": converted}, folder / f"{case}.pt")
        torch.distributed.barrier()


def _train_and_save(variant: Variant, stage: int, precision: str, folder: Path) -> dict[str, Tensor]:
    import deepspeed

    torch.manual_seed(3)
    config = _config(stage, precision, variant)
    if stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=config):
            module: nn.Module = Net(variant)
    else:
        module = Net(variant)
    engine, *_ = deepspeed.initialize(model=module, config=config, model_parameters=_groups(module, variant))
    rank = torch.distributed.get_rank()
    for step in range(3):
        tokens = torch.arange(4) + rank + step
        engine.backward(engine(tokens).float().pow(2).mean())
        engine.step()
    expected = _live(engine, module, variant)
    client = {
        "epoch": 2,
        "pytorch-lightning_version": "2.6.0",
        "hyper_parameters": {"width": 5, "data": Path("corpus")},
    }
    engine.save_checkpoint(str(folder), client_state=client, exclude_frozen_parameters=variant.exclude_frozen)
    engine.destroy()
    return expected


def _config(stage: int, precision: str, variant: Variant) -> dict[str, Any]:
    section: dict[str, Any] = {
        "stage": stage,
        "round_robin_gradients": variant.round_robin,
        "sub_group_size": 90,  # several flat groups at stage 3
    }
    if variant.offload:
        section["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": section,
        "data_types": {"grad_accum_dtype": "fp32" if variant.fp32_gradients else None},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }


def _groups(module: nn.Module, variant: Variant) -> list[dict[str, Any]]:
    named = list(module.named_parameters())
    if not variant.groups:
        return [{"params": [parameter for _, parameter in named]}]
    plain = [parameter for name, parameter in named if name.endswith(("bias", "1.weight", "scale"))]
    decayed = [parameter for name, parameter in named if not name.endswith(("bias", "1.weight", "scale"))]
    return [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.1}]


def _live(engine: Any, module: nn.Module, variant: Variant) -> dict[str, Tensor]:
    """The state dict as the engine holds it: fp32 masters gathered from all ranks, the rest as it is."""
    import deepspeed

    if variant.round_robin and engine.zero_optimization_stage() < 3:  # safe_get_full_fp32_param mixes them up then
        return {name: value.clone() for name, value in module.state_dict().items()}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    masters = _masters_of_stage_0(engine) if engine.zero_optimization_stage() == 0 else {}
    expected = {}
    frozen_first_names = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    for name, value in module.state_dict().items():
        parameter = parameters.get(name)
        if variant.exclude_frozen and name in frozen_first_names:
            continue
        if parameter is None:
            expected[name] = value.clone()
        elif parameter.requires_grad and getattr(parameter, "ds_numel", parameter.numel()) and not masters:
            whole = _gathered(parameter) if engine.zero_optimization_stage() == 0 else None
            expected[name] = deepspeed.utils.safe_get_full_fp32_param(parameter) if whole is None else whole
        else:
            expected[name] = masters[id(parameter)] if id(parameter) in masters else _gathered(parameter)
    return {name: value.detach().clone() for name, value in expected.items()}


def _gathered(parameter: nn.Parameter) -> Tensor:
    import deepspeed

    if not hasattr(parameter, "ds_id"):
        return parameter.detach().clone()
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _masters_of_stage_0(engine: Any) -> dict[int, Tensor]:
    """DeepSpeed's fp32 copies by the identity of the 16-bit parameter; none in fp32."""
    halves = getattr(engine.optimizer, "fp16_groups", [])
    return {
        id(half): master
        for group, copies in zip(halves, getattr(engine.optimizer, "fp32_groups", []), strict=True)
        for half, master in zip(group, copies, strict=True)
    }


def _convert(folder: Path) -> dict[str, Tensor]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    converted = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    return {name: value.clone() for name, value in converted.items()}
