"""A resolved config as a table to read."""

from __future__ import annotations

import io

from lightning_zero.config.dotted import leaves
from lightning_zero.config.resolve import ResolvedConfig
from lightning_zero.config.values import show

__all__ = ["explain"]


def explain(resolved: ResolvedConfig, *, width: int = 140) -> str:
    """A table with every key of a config, its value, and where it came from.

    Args:
        resolved: The result of :func:`resolve_config`.
        width: Columns of the terminal.

    Returns:
        Plain text, the keys in the config's order.
    """
    from rich.console import Console  # only who asks for the table pays for the import
    from rich.table import Table

    table = Table(title="DeepSpeed config", title_justify="left")
    for heading in ("key", "value", "origin"):
        table.add_column(heading, overflow="fold")
    for path, value in leaves(resolved.config):
        table.add_row(path, show(value), resolved.origins.get(path, ""))
    text = io.StringIO()
    Console(file=text, width=width, no_color=True, markup=False, highlight=False).print(table)
    return text.getvalue()
