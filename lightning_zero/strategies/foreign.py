"""The refusal that a Trainer of ``pytorch_lightning`` and a Fabric of ``lightning_fabric`` get.

The two packages share no class with ``lightning``.
"""

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

# The module in which a registry is -> its name there, what takes a strategy, and what to write instead.
_FOREIGN = {
    "pytorch_lightning.strategies": ("StrategyRegistry", "Trainer", "`L.Trainer` (and `L.LightningModule`)"),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "Fabric", "`L.Fabric`"),
}


def refuse_names(names: Iterable[str]) -> None:
    """Lets the other packages answer to our names with the import to use, whichever package is imported first.

    They are not imported for it: where one is not there yet, its registry gets the names when it comes.
    """
    chosen = tuple(names)
    waiting = {finder.module for finder in sys.meta_path if isinstance(finder, _Finder)}
    for module in _FOREIGN:
        if module in sys.modules:
            _register(sys.modules[module], chosen)
        elif module not in waiting:
            sys.meta_path.insert(0, _Finder(module, chosen))


def _register(strategies: ModuleType, names: Sequence[str]) -> None:
    registry = getattr(strategies, _FOREIGN[strategies.__name__][0])
    for name in names:
        if name not in registry:
            registry.register(name, _refusal(name, strategies.__name__), description="use `import lightning` instead")


def _refusal(name: str, module: str) -> Any:
    _, taker, instead = _FOREIGN[module]

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            f"strategy={name!r} is for the {taker} of the package `lightning`, and this one is "
            f"{module.partition('.')[0]}'s. Use `import lightning as L` and {instead}."
        )

    return refuse


class _Finder(MetaPathFinder):
    """Finds the module as everybody does, once, and has the names registered when it has been loaded."""

    def __init__(self, module: str, names: Sequence[str]) -> None:
        self.module = module
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
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
