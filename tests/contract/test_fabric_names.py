"""What a hand-written loop with two engines needs of DeepSpeed, held on real engines."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero._compat import deepspeed as compat
from lightning_zero.engine.accumulation import caller_owned
from tests.contract.test_deepspeed_names import engine
from tests.harness import ranks

UNMANAGED = {"managed_gradient_accumulation": False}


@ranks(1)
def test_backward_through_another_engine() -> None:
    """At stage 0, only `_support_torch_style_backward` forbids a backward pass that the engine has not started."""
    made = engine(0, **UNMANAGED)
    loss = made(torch.ones(2, 5)).pow(2).mean()
    with pytest.raises(RuntimeError, match="not supported in this configuration"):
        loss.backward()
    compat.allow_foreign_backward(made)
    made(torch.ones(2, 5)).pow(2).mean().backward()
    plain = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))
    plain.load_state_dict(made.module.state_dict())
    plain(torch.ones(2, 5)).pow(2).mean().backward()
    for ours, expected in zip(made.module.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, expected.grad)


@ranks(1)
def test_managed_engines_are_left_alone() -> None:
    """Where DeepSpeed counts micro-batches, or at stages 1-3, nothing is set."""
    assert engine(0)._support_torch_style_backward is False
    managed = engine(0)
    compat.allow_foreign_backward(managed)
    assert managed._support_torch_style_backward is False
    assert engine(2, **UNMANAGED)._support_torch_style_backward is True


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks(1)
def test_who_keeps_the_gradient_norm(stage: int) -> None:
    """`get_global_grad_norm` tells the norm after a step, but for stage 0 in fp32, where it stays None."""
    made = engine(stage, **caller_owned({"gradient_clipping": 1e9}))
    made.backward(made(torch.ones(2, 5)).pow(2).mean())
    made.step()
    assert (made.get_global_grad_norm() is not None) is compat.keeps_gradient_norm(made)
