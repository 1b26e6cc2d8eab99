"""The optimizer of an engine: what Lightning and its callbacks see of it, and the swap to DeepSpeed's CPU Adam."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lightning_zero._compat.torch import mark_stepped
from lightning_zero.engine.accumulation import AccumulationWindow

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_ADAM_FLAGS_WITHOUT_CPU_VERSION = ("amsgrad", "maximize", "capturable", "differentiable")


class EngineOptimizer(Optimizer):
    """An engine as a :class:`torch.optim.Optimizer`: its step is the engine's, its groups are the live ones.

    Args:
        engine: The training engine.
        window: The engine's accumulation window.
        source: The optimizer that the user wrote, when there is one. Callbacks that pair optimizers with schedulers
            find it under ``.optimizer``.
    """

    # Optimizer.__init__ would want parameters; everything it would make is the engine's.
    def __init__(self, engine: DeepSpeedEngine, window: AccumulationWindow, source: Optimizer | None) -> None:
        self._engine = engine
        self._window = window
        self.optimizer = source if source is not None else engine.basic_optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups that the update reads, with live learning rates; ``params`` are the engine's flat shards."""
        groups: list[dict[str, Any]] = self._engine.basic_optimizer.param_groups
        return groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Defaults of the optimizer that makes the update."""
        defaults: dict[str, Any] = self._engine.basic_optimizer.defaults
        return defaults

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """This rank's shard of the optimizer state."""
        state: Mapping[Any, Any] = self._engine.basic_optimizer.state
        return state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one update of the engine."""
        result = None if closure is None else closure()
        self._window.step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the current window, at every stage; ``set_to_none`` has no meaning for shards."""
        self._window.clear()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the optimizer state is sharded and is saved with the checkpoint, one shard by each rank."""
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        """Does nothing: the shards are loaded with the checkpoint."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._engine.basic_optimizer!r})"


def has_cpu_version(optimizer: Optimizer) -> bool:
    """Whether DeepSpeed's CPU Adam computes what this optimizer computes.

    Args:
        optimizer: An optimizer from code.
    """
    if _is_deepspeed_cpu_optimizer(optimizer):
        return True
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    groups = optimizer.param_groups
    plain = not any(group.get(flag) for group in groups for flag in _ADAM_FLAGS_WITHOUT_CPU_VERSION)
    return plain and not any(isinstance(group["lr"], torch.Tensor) for group in groups)


def to_cpu_adam(optimizer: Optimizer) -> Optimizer:
    """DeepSpeed's CPU Adam over the *same* parameter groups, so that a scheduler built on them keeps working.

    Args:
        optimizer: An optimizer for which :func:`has_cpu_version` holds.

    Returns:
        The optimizer itself when it is DeepSpeed's already, else a ``DeepSpeedCPUAdam`` whose ``param_groups`` are the
        same dictionaries.
    """
    if _is_deepspeed_cpu_optimizer(optimizer):
        return optimizer
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    decoupled = isinstance(optimizer, torch.optim.AdamW)
    defaults = {name: optimizer.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
    swapped: Optimizer = DeepSpeedCPUAdam(optimizer.param_groups, adamw_mode=decoupled, **defaults)
    # torch adopts the dictionaries it is given; were it to copy them, schedulers would move a dead learning rate.
    assert all(new is old for new, old in zip(swapped.param_groups, optimizer.param_groups, strict=True))
    mark_stepped(optimizer)
    return swapped


def _is_deepspeed_cpu_optimizer(optimizer: Optimizer) -> bool:
    return type(optimizer).__name__ in ("DeepSpeedCPUAdam", "DeepSpeedCPULion", "DeepSpeedCPUAdagrad")


def unsupported_reason(optimizer: Optimizer) -> str | None:
    """Why an optimizer cannot train under ZeRO, or ``None``."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS evaluates the loss several times in one update, which DeepSpeed's engine cannot do"
    if isinstance(optimizer, torch.optim.SparseAdam):
        return "SparseAdam needs sparse gradients, and ZeRO's gradient shards are dense"
    return None
