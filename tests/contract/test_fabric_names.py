"""What a hand-written loop with two engines needs of DeepSpeed, held on real engines."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero._compat import deepspeed as compat
from lightning_zero.engine.accumulation import caller_owned
from tests.contract.test_deepspeed_names import engine
from tests.harness import ranks


@pytest.mark.parametrize("stage", [0, 1, 2])
@ranks(1)
def test_backward_through_another_engine(stage: int) -> None:
    """`_running_engine_backward` and its count leave the end to others, and `_backward_epilogue` is that end.

    Without them stage 0 refuses such a backward pass, and after several forwards `_backward_active_depth` stays.
    """
    made = engine(stage, **caller_owned({"gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}))
    rows = torch.ones(2, 5)
    if stage == 0:
        with pytest.raises(RuntimeError, match="not supported in this configuration"):
            made(rows).pow(2).mean().backward()
    plain = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))
    plain.load_state_dict(made.module.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        (plain(rows).pow(2).mean() + plain(2 * rows).pow(2).mean()).backward()
        compat.begin_backward(made)
        with compat.foreign_backward(made):
            assert made._running_engine_backward and made._running_engine_backward_count == 1
            (made(rows).pow(2).mean() + made(2 * rows).pow(2).mean()).backward()
        compat.end_foreign_backward(made)
        if stage > 0:
            assert made.optimizer._backward_active_depth == 1, "two forwards entered, one end left"
        compat.leave_backward(made)
    assert getattr(made.optimizer, "_backward_active_depth", 0) == 0
    made.step()
    optimizer.step()
    for ours, expected in zip(made.module.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, expected, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks(1)
def test_who_keeps_the_gradient_norm(stage: int) -> None:
    """`get_global_grad_norm` tells the norm after a step, but for stage 0 in fp32, where it stays None."""
    made = engine(stage, **caller_owned({"gradient_clipping": 1e9}))
    made.backward(made(torch.ones(2, 5)).pow(2).mean())
    made.step()
    assert (made.get_global_grad_norm() is not None) is compat.keeps_gradient_norm(made)
