"""The models that a Fabric has set up, and which of them a user means."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from lightning.fabric import is_wrapped
from torch.nn import Module

from lightning_zero.config.resolve import ResolvedConfig
from lightning_zero.engine.session import EngineSession, session_of
from lightning_zero.errors import ConfigError


class SetUpModels:
    """Models with their configs, in the order of their set-up; each as long as somebody else keeps it.

    A model is named by what ``fabric.setup`` returned, by its engine, or by the module that was given.
    """

    def __init__(self) -> None:
        self._resolved: WeakKeyDictionary[Module, ResolvedConfig] = WeakKeyDictionary()
        self.last_resolved: ResolvedConfig | None = None
        """The config of the model set up last, also when it is gone."""

    def add(self, module: Module, resolved: ResolvedConfig) -> None:
        """Remembers a model as the last one set up."""
        self._resolved.pop(module, None)
        self._resolved[module] = self.last_resolved = resolved

    def forget(self, module: Module) -> None:
        """Takes a model out."""
        self._resolved.pop(module, None)

    def resolved(self, module: Module) -> ResolvedConfig:
        """The config of a model that :meth:`find` or :meth:`meant` has found."""
        return self._resolved[module]

    @property
    def all(self) -> list[Module]:
        """Every model."""
        return list(self._resolved)

    @property
    def trained(self) -> list[EngineSession]:
        """The sessions of the models that are trained."""
        sessions = map(session_of, self._resolved)
        return [session for session in sessions if session is not None and not session.evaluate]

    def find(self, model: Any) -> Module | None:
        """The module of a model that has been set up, or ``None``."""
        if not isinstance(model, Module):
            return None
        module = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
        if is_wrapped(module):
            module = module.module
        for known in self._resolved:
            session = session_of(known)
            if known is module or (session is not None and session.engine is module):
                return known
        return None

    def find_optimizer(self, optimizer: Any) -> EngineSession | None:
        """The session that an optimizer steps: what ``fabric.setup`` returned, or the one that was given to it."""
        inner = getattr(optimizer, "optimizer", optimizer) if is_wrapped(optimizer) else optimizer
        for session in self.trained:
            if inner is session.optimizer or inner is session.optimizer.optimizer:
                return session
        return None

    def meant(self, model: Any, call: str) -> Module:
        """The model that a user means, which need not be said when there is only one.

        Args:
            model: What the user gave, or ``None``.
            call: The call to write instead, with ``{}`` for the argument.

        Raises:
            ConfigError: No such model has been set up, or several and none is named.
        """
        if model is not None:
            found = self.find(model)
            if found is None:
                raise ConfigError(
                    f"{type(model).__name__} has not been set up by this Fabric. Call `fabric.setup` with it first, "
                    "and pass what that returns."
                )
            return found
        if not self._resolved:
            raise ConfigError("No model has been set up. Call `model, optimizer = fabric.setup(model, optimizer)`.")
        if len(self._resolved) > 1:
            names = ", ".join(type(module).__name__ for module in self._resolved)
            raise ConfigError(
                f"{len(self._resolved)} models have been set up: {names}. Say which: `{call.format('model')}`."
            )
        return self.all[0]

    def training(self, model: Any, call: str) -> EngineSession:
        """As :meth:`meant`, for a model that is trained; among several, the only one that is."""
        if model is None and len(self.trained) == 1:
            return self.trained[0]
        module = self.meant(model, call)
        session = session_of(module)
        if session is None or session.evaluate:
            raise ConfigError(
                f"{type(module).__name__} was set up without an optimizer, so nothing trains it. Call "
                "`fabric.setup(model, optimizer)`, or describe the optimizer in the config."
            )
        return session
