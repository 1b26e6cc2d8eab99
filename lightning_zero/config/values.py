"""Values as people write them: numbers inside strings, whole floats, the comparison of what two places say."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal

__all__ = ["Kind", "read", "same", "show"]

Kind = Literal[
    "integer", "count", "updates", "number", "numbers", "per_group", "boolean", "text", "section", "list", "any"
]
"""What belongs under a key. A ``count`` is at least 1, and so are ``updates``, where 0 is read as 1 (DeepSpeed refuses
0). ``per_group`` is one number for all parameter groups, or a list with one for each."""

_WORDS = {"true": True, "false": False}


def show(value: Any) -> str:
    """A value as the config file would write it."""
    return json.dumps(value, default=str)


def read(kind: Kind, value: Any) -> Any:
    """A value in the type its key wants: ``"5e8"`` under an integer key is ``500000000``.

    Raises:
        ValueError: When it cannot be read so; the message says what belongs there.
    """
    if kind == "boolean":
        return _boolean(value)
    if kind == "integer":
        return _integer(value)
    if kind in ("count", "updates"):
        return _count(value, zero_is_one=kind == "updates")
    if kind == "number":
        return _number(value)
    if kind == "numbers" or (kind == "per_group" and isinstance(value, (list, tuple))):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError("a list of numbers")
        return [_number(entry) for entry in value]
    if kind == "per_group":
        return _number(value)
    return value


def same(one: Any, other: Any) -> bool:
    """Whether two values mean the same: ``2e8`` and ``200000000``, ``[0.9, 0.999]`` and ``(0.9, 0.999)``."""
    if isinstance(one, numbers.Real) and isinstance(other, numbers.Real):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=0.0)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, (list, tuple)) and isinstance(other, numbers.Real):  # a list per group, all of them alike
        return bool(one) and all(same(entry, other) for entry in one)
    if isinstance(other, (list, tuple)) and isinstance(one, numbers.Real):
        return same(other, one)
    return bool(one == other)


def _boolean(value: Any) -> bool:
    if isinstance(value, str) and value.strip().lower() in _WORDS:
        return _WORDS[value.strip().lower()]
    if isinstance(value, numbers.Real) and value in (0, 1):
        return bool(value)
    raise ValueError("true or false")


def _number(value: Any) -> float | int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
        try:
            return float(value)
        except ValueError:
            raise ValueError("a number") from None
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise ValueError("a number")


def _integer(value: Any) -> int:
    try:
        number = _number(value)
    except ValueError:
        raise ValueError("a whole number") from None
    if not math.isfinite(number) or number != int(number):
        raise ValueError("a whole number")
    return int(number)


def _count(value: Any, *, zero_is_one: bool) -> int:
    try:
        number = _integer(value)
    except ValueError:
        number = -1
    if number == 0 and zero_is_one:
        return 1
    if number < 1:
        raise ValueError("a whole number of at least 1")
    return number
