"""DeepSpeed's undocumented names inside `zero.Init`."""

from __future__ import annotations

import os

import torch
from torch import nn

from tests.harness import ranks

CONFIG = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}


class Normed(nn.Module):
    """A module with parameters of its own, in its children and in a list, and with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.own = nn.Parameter(torch.rand(7))
        self.listed = nn.ParameterList([torch.rand(2)])
        self.register_buffer("scale", torch.tensor([1.001], dtype=torch.float32))


@ranks(1)
def test_parameters_are_cast_as_they_are_sharded_and_nothing_else_is() -> None:
    """`_post_init_method` sees each parameter before it is sharded, and without the dtype half of `tensor_overrides`
    nothing else becomes 16-bit: the shards are those of a module drawn in fp32 and cast. `suspended_init` builds whole
    modules in between, and `top_level_context` is patched again after it.
    """
    import deepspeed

    from lightning_zero._compat.deepspeed import suspended_init
    from lightning_zero._compat.deepspeed_init import casting_init

    os.environ["LOCAL_RANK"] = "0"
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    torch.manual_seed(8)
    expected = Normed()
    torch.manual_seed(8)
    with casting_init(CONFIG):
        module = Normed()
        for _ in range(2):
            with suspended_init(), suspended_init():
                whole = nn.Linear(2, 2)
        after = nn.Linear(2, 2)
    assert whole.weight.numel() == 4 and whole.weight.dtype == torch.float32
    assert after.weight.numel() == 0
    assert nn.Linear(2, 2).weight.numel() == 4
    for name, parameter in module.named_parameters():
        assert parameter.numel() == 0
        with deepspeed.zero.GatheredParameters([parameter]):
            assert parameter.dtype == torch.bfloat16
            assert torch.equal(parameter, expected.get_parameter(name).bfloat16()), name
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, expected.get_buffer(name)) and buffer.dtype == expected.get_buffer(name).dtype
