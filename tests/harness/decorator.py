"""`@ranks`: a test whose body runs on N ranks."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.harness.launch import RankError, run_ranks


def ranks(
    *world_sizes: int, timeout: float = 120, env: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs the decorated test's body on every rank, once for each of `world_sizes`.

    Fixtures and parameters arrive with the same values on all ranks (they are pickled); a body that wants the number of
    ranks takes `world_size`.

    Args:
        world_sizes: numbers of ranks, e.g. `@ranks(2)` or `@ranks(1, 2, 3)`.
        timeout: seconds until the ranks are killed.
        env: variables beside torchrun's.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(body).parameters

        @functools.wraps(body)
        def test(world_size: int, **fixtures: Any) -> None:
            if "world_size" in parameters:
                fixtures["world_size"] = world_size
            try:
                run_ranks(test, world_size, timeout=timeout, env=env, **fixtures)
            except RankError as failure:
                pytest.fail(str(failure), pytrace=False)  # the ranks' tracebacks say all

        size = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
        others = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters.values() if p.name != "world_size"]
        test.__signature__ = inspect.Signature([*others, size])  # type: ignore[attr-defined]  # pytest reads it
        test.rank_body = body  # type: ignore[attr-defined]  # what the ranks call
        parametrized: Callable[..., None] = pytest.mark.parametrize(
            "world_size", world_sizes, ids=[f"{n}r" for n in world_sizes]
        )(test)
        return parametrized

    return decorate
