"""Names in an export: which part of a state-dict key is the model's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_zero.errors import CheckpointError

__all__ = ["common_prefix", "rename_keys", "without_compile_prefix"]

_COMPILED = "_orig_mod."


def without_compile_prefix(key: str) -> str:
    """A key as it reads without ``torch.compile`` around any module on its way.

    Args:
        key: A state-dict key.
    """
    return key.replace(_COMPILED, "")


def common_prefix(keys: Iterable[str]) -> str:
    """The first attribute, with its dot, if every key lies below it; else nothing.

    Args:
        keys: State-dict keys.
    """
    heads = {key.partition(".")[0] + "." if "." in key else "" for key in keys}
    return heads.pop() if len(heads) == 1 else ""


def rename_keys(keys: Sequence[str], prefix: str, *, strip_compile: bool, only_below: bool) -> dict[str, str]:
    """New names for the entries of a state dict.

    Args:
        keys: State-dict keys.
        prefix: Removed where a key begins with it; a missing final dot is added.
        strip_compile: Whether ``_orig_mod.`` is removed, first.
        only_below: Whether keys without the prefix are left out rather than kept as they are.

    Returns:
        Old name to new name, in order.

    Raises:
        CheckpointError: No key has the prefix, or two keys get one name.
    """
    prefix = f"{prefix}." if prefix and not prefix.endswith(".") else prefix
    plain = {key: without_compile_prefix(key) if strip_compile else key for key in keys}
    if keys and not any(name.startswith(prefix) for name in plain.values()):
        raise CheckpointError(
            f"No weight's name begins with the prefix {prefix!r}. They begin: {', '.join(list(plain.values())[:5])}."
        )
    renamed = {
        key: name.removeprefix(prefix) for key, name in plain.items() if name.startswith(prefix) or not only_below
    }
    owners: dict[str, str] = {}
    for key, name in renamed.items():
        if owners.setdefault(name, key) != key:
            raise CheckpointError(
                f"Without the prefix {prefix!r}, {owners[name]!r} and {key!r} would both be {name!r}. Keep the prefix."
            )
    return renamed
