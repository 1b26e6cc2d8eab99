"""One engine's life around a module, from its start to its release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_zero._compat.deepspeed import unsharded_masters
from lightning_zero.engine import initialize, ops
from lightning_zero.engine.accumulation import AccumulationWindow
from lightning_zero.engine.optimizers import EngineOptimizer, to_cpu_adam
from lightning_zero.engine.partition import whole_parameters
from lightning_zero.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# An engine lives in its module's hooks, so a module has one at a time, whichever strategy started it, and keeps it.
_ATTRIBUTE = "_zero_session"


def session_of(module: Module) -> EngineSession | None:
    """The session of the engine around a module, if there is one."""
    session: EngineSession | None = vars(module).get(_ATTRIBUTE)
    return session


def end_session(module: Module) -> None:
    """Ends the engine around a module, if there is one. Collective."""
    session = session_of(module)
    if session is not None:
        session.release()


class EngineSession:
    """An engine and what must be known to end it. Another engine around the module is ended first.

    Args:
        module: The module to train or evaluate.
        config: A resolved config.
        device: This rank's device.
        local_rank: This rank's number on its host.
        optimizer: The optimizer from code; ``None``: the one of the config's ``optimizer`` section.
        clipping: Largest global gradient norm of an update that nobody clips; 0 does not clip.
        evaluate: No optimizer at all.
    """

    def __init__(
        self,
        module: Module,
        config: Mapping[str, Any],
        *,
        device: torch.device,
        local_rank: int,
        optimizer: Optimizer | None = None,
        clipping: float = 0.0,
        evaluate: bool = False,
    ) -> None:
        end_session(module)
        self.module = module
        zero = config.get("zero_optimization", {})
        self.stage = int(zero.get("stage", 0))
        self._deals_round_robin = self.stage in (1, 2) and bool(zero.get("round_robin_gradients")) and not evaluate
        self.evaluate = evaluate
        self.ended = False
        self._whole_before = whole_parameters(module)
        updating = optimizer
        if optimizer is not None and ops.wants_cpu_optimizer(config):
            updating = to_cpu_adam(optimizer)
        self.swapped = updating is not optimizer
        self.engine: DeepSpeedEngine = initialize.start_engine(
            module, config, device=device, local_rank=local_rank, optimizer=updating, evaluate=evaluate
        )
        vars(module)[_ATTRIBUTE] = self
        self.scheduler: Any = self.engine.lr_scheduler
        """The scheduler that the config's section made, if any; whoever trains steps it, not the engine."""
        self.engine.lr_scheduler = None
        self._window = None if evaluate else AccumulationWindow(self.engine, clipping=clipping)
        self._optimizer = None if evaluate else EngineOptimizer(self.engine, self.window, optimizer)

    @property
    def window(self) -> AccumulationWindow:
        """The accumulation window of a training engine."""
        assert self._window is not None
        return self._window

    @property
    def optimizer(self) -> EngineOptimizer:
        """The engine as an optimizer, for a training engine."""
        assert self._optimizer is not None
        return self._optimizer

    @property
    def masters(self) -> dict[Parameter, Tensor]:
        """The fp32 weights that the engine keeps whole, as at stage 0 in 16 bits; shards are found by themselves.

        Raises:
            CheckpointError: DeepSpeed would give the shards of other parameters.
        """
        if self._deals_round_robin:
            raise CheckpointError(
                "zero_optimization.round_robin_gradients: with it, DeepSpeed gives fp32 weights of another parameter "
                "than the one it is asked for. Save a whole checkpoint and use `consolidate`, or turn it off."
            )
        return unsharded_masters(self.engine)

    def follow_loaded_groups(self) -> None:
        """Points the user's optimizer to the parameter groups that a load has put in the place of its own.

        A scheduler moves the learning rates of the optimizer that it was built on, which is not the one that updates
        when that was swapped.
        """
        if self.swapped:
            self.optimizer.optimizer.param_groups = self.engine.basic_optimizer.param_groups

    def release(self) -> None:
        """Ends the engine. Parameters that were whole before it are whole again. Collective."""
        if self.ended:
            return
        self.ended = True
        vars(self.module).pop(_ATTRIBUTE, None)
        initialize.release_engine(self.engine, whole=self._whole_before)
        del self.engine
        self._window = self._optimizer = self.scheduler = None

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the module has no engine."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()
