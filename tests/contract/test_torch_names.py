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
