"""torch's private names."""

import warnings

import pytest
import torch

from lightning_zero._compat.torch import mark_stepped


def _scheduler() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_opt_called_is_what_schedulers_ask() -> None:
    """A scheduler warns when its optimizer has not stepped, and `_opt_called` says that it has."""
    _, alone = _scheduler()
    with pytest.warns(UserWarning, match=r"before `optimizer\.step\(\)`"):
        alone.step()
    optimizer, marked = _scheduler()
    mark_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        marked.step()
    assert optimizer._opt_called is True


def test_step_sets_opt_called() -> None:
    """Stepping sets `_opt_called`, so that the name means what it says."""
    optimizer, _ = _scheduler()
    assert not getattr(optimizer, "_opt_called", False)
    optimizer.step()
    assert optimizer._opt_called is True


def test_metric_states_are_changed_by_any_function() -> None:
    """`Module._apply(fn)`, as torchmetrics overrides it, gives every state, default and buffer to `fn`."""
    from torchmetrics import SumMetric

    from lightning_zero._compat.torchmetrics import keep_states_in_fp32

    metric = SumMetric().to(torch.bfloat16)
    assert metric.sum_value.dtype == torch.bfloat16
    module = torch.nn.ModuleDict({"metric": metric, "layer": torch.nn.Linear(2, 2).bfloat16()})
    keep_states_in_fp32(module)
    assert metric.sum_value.dtype == torch.float32 and module["layer"].weight.dtype == torch.bfloat16
    metric.update(torch.tensor(1.001))
    metric.reset()
    assert metric.sum_value.dtype == metric.dtype == torch.float32
