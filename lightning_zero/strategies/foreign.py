"""The refusal that a Trainer of the package ``pytorch_lightning`` gets, which shares no class with ``lightning``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_zero.errors import ConfigError

_STRATEGIES = "pytorch_lightning.strategies"


def refuse_names(names: Iterable[str]) -> None:
    """Lets ``pytorch_lightning`` answer to our names with the import to use, whichever package is imported first.

    ``pytorch_lightning`` is not imported for it: where it is not there yet, its registry gets the names when it comes.
    """
    chosen = tuple(names)
    if _STRATEGIES in sys.modules:
        _register(sys.modules[_STRATEGIES], chosen)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(chosen))


def _register(strategies: ModuleType, names: Sequence[str]) -> None:
    for name in names:
        if name not in strategies.StrategyRegistry:
            strategies.StrategyRegistry.register(name, _refusal(name), description="use `import lightning` instead")


def _refusal(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            f"strategy={name!r} is for the Trainer of the package `lightning`, and this one is pytorch_lightning's. "
            "Use `import lightning as L` and `L.Trainer` (and `L.LightningModule`)."
        )

    return refuse


class _Finder(MetaPathFinder):
    """Finds the module as everybody does, once, and has the names registered when it has been loaded."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _STRATEGIES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader, self._names)
        return spec


class _Registering(Loader):
    def __init__(self, loader: Loader, names: Sequence[str]) -> None:
        self._loader = loader
        self._names = names

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module, self._names)
