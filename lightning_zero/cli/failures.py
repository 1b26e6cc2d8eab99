"""How an error ends the program: one message, no traceback, exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable

from lightning_zero.errors import ZeroError

__all__ = ["DEBUG", "exit_code_of"]

DEBUG = "--debug"
"""The flag that shows an error's traceback."""


def exit_code_of(work: Callable[[], int], program: str, *, debug: bool) -> int:
    """Does the work, and tells of what was refused in one message, on the first rank alone.

    Errors in the user's own code keep their traceback, which is where the mistake is.

    Args:
        work: Returns an exit code.
        program: What the message begins with.
        debug: Let refusals through as well.

    Returns:
        The exit code: that of the work, 2 for what was refused, 130 after an interrupt.
    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    try:
        return work()
    except (ZeroError, MisconfigurationException) as error:
        if debug:
            raise
        # Every rank refuses the same, and each would say so.
        if getattr(rank_zero_only, "rank", 0) == 0:
            print(f"{program}: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130
