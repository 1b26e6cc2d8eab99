"""Nested mappings addressed by dotted keys, as DeepSpeed's documentation writes them: ``zero_optimization.stage``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

__all__ = ["MISSING", "drop", "find_auto", "get", "is_auto", "leaves", "merge", "plain", "put"]

MISSING: Final = object()
"""What :func:`get` returns for a key that is not there; ``None`` is a value that JSON can write."""


def is_auto(value: object) -> bool:
    """Whether a value is the word ``"auto"``."""
    return isinstance(value, str) and value.strip().lower() == "auto"


def plain(value: Any) -> Any:
    """A copy in which every mapping is a fresh dict and every sequence a fresh list."""
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain(entry) for entry in value]
    return value


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key and value of a tree; an empty mapping counts as a value."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def get(tree: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted key, or :data:`MISSING`."""
    node: Any = tree
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return MISSING
        node = node[part]
    return node


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted key, making the sections on the way."""
    *sections, last = path.split(".")
    for part in sections:
        inner = tree.get(part)
        if not isinstance(inner, dict):
            inner = tree[part] = {}
        tree = inner
    tree[last] = value


def drop(tree: dict[str, Any], path: str) -> None:
    """Remove a dotted key if it is there; its section stays."""
    section, _, last = path.rpartition(".")
    node = get(tree, section) if section else tree
    if isinstance(node, dict):
        node.pop(last, None)


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A fresh tree with the values of both; where both have one, ``over`` wins, and mappings are merged."""
    merged = plain(under)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = merge(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else plain(value)
    return dict(merged)


def find_auto(value: Any, path: str = "") -> Iterator[str]:
    """The path of every ``"auto"`` in a tree, inside lists too (``optimizer.params.betas[0]``)."""
    if is_auto(value):
        yield path
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from find_auto(entry, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from find_auto(entry, f"{path}[{index}]")
