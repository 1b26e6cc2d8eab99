"""torch's private names, each with what it is, why it is needed and where it was last seen (2.13)."""

from __future__ import annotations

from torch.optim import Optimizer


def mark_stepped(optimizer: Optimizer) -> None:
    """Says that ``optimizer.step`` was called, for an optimizer whose groups another one now steps.

    ``LRScheduler`` warns that it was stepped before its optimizer unless ``_opt_called`` is set.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]
