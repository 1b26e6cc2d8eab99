"""What the program prints: tables, and how far long work is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

__all__ = ["console", "progress_bar", "table"]

_WIDE = 10_000  # columns where nothing needs to fit a screen


def console() -> Console:
    """Standard output; lines are broken on a terminal only."""
    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=_WIDE)


def table(rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> Table:
    """Rows in aligned columns.

    Args:
        rows: The cells.
        header: Names of the columns, or nothing.
    """
    made = Table(*header, box=None, show_header=bool(header), pad_edge=False)
    for row in rows:
        made.add_row(*row)
    return made


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show how far work is: a bar on a terminal, a line for each tenth elsewhere.

    Args:
        what: The work.

    Yields:
        A function to call with (done, total), in bytes.
    """
    screen = console()
    if not screen.is_terminal:
        yield _plain_lines(what, screen)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen) as bars:
        task = bars.add_task(what)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _plain_lines(what: str, screen: Console) -> Callable[[int, int], None]:
    shown = 0

    def progress(done: int, total: int) -> None:
        nonlocal shown
        tenths = 10 * done // total if total else 10
        if tenths > shown:
            shown = tenths
            screen.print(f"{what}: {10 * tenths} % of {total / 1e6:.1f} MB")

    return progress
