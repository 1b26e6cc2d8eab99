"""What a Trainer and its module know, read into :class:`RunFacts` without advancing or rebuilding anything."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.trainer.states import TrainerFn
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zero._compat.lightning import loaders_from_hook, loaders_passed_to_fit
from lightning_zero.callbacks.gathered_weights import GatheredWeightsCheckpoint
from lightning_zero.config.facts import Fact, RunFacts
from lightning_zero.engine.optimizers import has_cpu_version
from lightning_zero.integrations.transformers import hidden_size

if TYPE_CHECKING:
    import lightning.pytorch as pl

_LR_NAMES = ("lr", "learning_rate")
_ADAM_BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.999}


def early_facts(trainer: pl.Trainer, *, micro_batch_size: int | None, auto: Mapping[str, Any]) -> RunFacts:
    """What is known before the model is built: flags, hyper-parameters, loaders given to ``fit``.

    Args:
        trainer: A Trainer whose strategy has been connected to a module.
        micro_batch_size: The strategy's argument.
        auto: The strategy's argument.
    """
    strategy = trainer.strategy
    module = trainer.lightning_module
    fitting = trainer.state.fn == TrainerFn.FITTING
    device: str = strategy.root_device.type
    accelerator: Literal["cpu", "cuda"] = "cpu" if device == "cpu" else "cuda"
    nodes = trainer.num_nodes
    world = nodes * trainer.num_devices
    micro = None
    if micro_batch_size is not None:
        micro = Fact(micro_batch_size, f"micro_batch_size={micro_batch_size}")
    elif fitting:
        micro = _micro_batch_size(loaders_passed_to_fit(trainer))
    return RunFacts(
        purpose="fit" if fitting else "evaluate",
        world_size=Fact(world, f"Trainer(num_nodes={nodes}, devices={trainer.num_devices})"),
        num_nodes=Fact(nodes, f"Trainer(num_nodes={nodes})"),
        node_rank=Fact(trainer.node_rank, "the cluster environment's node rank"),
        accelerator=accelerator,
        precision=Fact(str(trainer.precision), f"Trainer(precision={str(trainer.precision)!r})"),
        micro_batch_size=micro,
        accumulate_grad_batches=Fact(
            trainer.accumulate_grad_batches, f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})"
        ),
        gradient_clip_val=_flag(trainer.gradient_clip_val, "gradient_clip_val"),
        gradient_clip_algorithm=trainer.gradient_clip_algorithm and str(trainer.gradient_clip_algorithm.value),
        **hyper_parameters(module),
        gathers_weights=_gathers_weights(trainer) if fitting else None,
        auto=auto,
    )


def hyper_parameters(module: Module) -> dict[str, Any]:
    """What a module's hyper-parameters tell, by the names of :class:`RunFacts`.

    Args:
        module: A LightningModule, or any other that may have such attributes.
    """
    return {
        "learning_rate": _learning_rate(module),
        "betas": _betas(module),
        "eps": _hyper_parameter(module, "eps", "adam_epsilon"),
        "weight_decay": _hyper_parameter(module, "weight_decay"),
        "warmup_steps": _hyper_parameter(module, "warmup_steps", "warmup_ratio"),
    }


def optimizer_facts(optimizer: Optimizer | None, place: str) -> dict[str, Any]:
    """What an optimizer from code tells, by the names of :class:`RunFacts`.

    Args:
        optimizer: The optimizer, if code gives one.
        place: The call or hook that it came from, for messages.
    """
    if optimizer is None:
        return {"optimizer_from_code": False}
    name = type(optimizer).__name__
    return {
        "optimizer_from_code": True,
        "optimizer_lrs": Fact([float(group["lr"]) for group in optimizer.param_groups], f"the optimizer of {place}"),
        "optimizer_has_cpu_version": Fact(has_cpu_version(optimizer), f"{name} of {place}"),
    }


def final_facts(
    early: RunFacts,
    trainer: pl.Trainer,
    *,
    optimizer: Optimizer | None,
    scheduler_from_code: bool,
    needs_total_steps: bool,
) -> RunFacts:
    """What is known when model and optimizer exist.

    Args:
        early: The facts of the early pass.
        trainer: The Trainer, fitting.
        optimizer: The optimizer from code.
        scheduler_from_code: Whether code gave a learning-rate scheduler.
        needs_total_steps: Whether the config asks for the number of updates; it is not computed otherwise, since that
            makes the training loaders.
    """
    size = hidden_size(trainer.lightning_module)
    micro = early.micro_batch_size or _micro_batch_size(loaders_from_hook(trainer))
    return replace(
        early,
        micro_batch_size=micro,
        hidden_size=None if size is None else Fact(*size),
        scheduler_from_code=scheduler_from_code,
        **optimizer_facts(optimizer, "configure_optimizers"),
        total_steps=_total_steps(trainer) if needs_total_steps else None,
    )


def _gathers_weights(trainer: pl.Trainer) -> Fact[bool] | None:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    found = any(isinstance(callback, GatheredWeightsCheckpoint) for callback in callbacks)
    return Fact(True, "Trainer(callbacks=[GatheredWeightsCheckpoint(...)])") if found else None


def _flag(value: float | None, name: str) -> Fact[float] | None:
    return None if value is None else Fact(float(value), f"Trainer({name}={value})")


def _micro_batch_size(loaders: Sequence[Any]) -> Fact[int] | None:
    """The largest batch size that loaders tell by their attributes."""
    sizes = [size for size in map(_loader_batch_size, loaders) if size is not None]
    if not sizes:
        return None
    largest = max(sizes, key=lambda fact: fact.value)
    if len(loaders) > 1:
        return Fact(largest.value, f"{largest.origin}, the largest of {len(loaders)} loaders")
    return largest


def _loader_batch_size(loader: Any) -> Fact[int] | None:
    places = (
        ("batch_sampler.batch_size", getattr(loader, "batch_sampler", None)),
        ("batch_size", loader),
    )
    for place, holder in places:
        size = getattr(holder, "batch_size", None)
        if not isinstance(size, bool) and isinstance(size, numbers.Integral):
            return Fact(int(size), f"{type(loader).__name__}.{place}")
    return None


def _total_steps(trainer: pl.Trainer) -> Fact[float]:
    """Updates in the run; infinite where Lightning says -1, for a loader that does not tell its length."""
    steps = trainer.estimated_stepping_batches
    return Fact(math.inf if steps < 0 else steps, "trainer.estimated_stepping_batches")


def _learning_rate(module: Module) -> Fact[Any] | None:
    """``lr``, then ``learning_rate``: an attribute of the module or a hyper-parameter.

    A property is not asked: it may well look at an optimizer, which does not exist yet.
    """
    for name in _LR_NAMES:
        value = inspect.getattr_static(module, name, None)
        if _is_number(value):
            return Fact(value, f"module.{name}")
        value = _hparams(module).get(name)
        if _is_number(value):
            return Fact(value, f"module.hparams.{name}")
    return None


def _hyper_parameter(module: Module, *names: str) -> Fact[Any] | None:
    hparams = _hparams(module)
    return next(
        (Fact(hparams[name], f"module.hparams.{name}") for name in names if _is_number(hparams.get(name))), None
    )


def _betas(module: Module) -> Fact[Sequence[float]] | None:
    hparams = _hparams(module)
    pair = hparams.get("betas")
    if isinstance(pair, Sequence) and len(pair) == 2 and all(map(_is_number, pair)):
        return Fact(list(pair), "module.hparams.betas")
    said = [name for name in _ADAM_BETAS if _is_number(hparams.get(name))]
    if not said:
        return None
    values = [hparams[name] if name in said else default for name, default in _ADAM_BETAS.items()]
    return Fact(values, f"module.hparams.{' and '.join(said)}")


def _hparams(module: Module) -> Mapping[str, Any]:
    hparams: Any = getattr(module, "hparams", None)  # Lightning's modules have them
    return hparams if isinstance(hparams, Mapping) else {}


def _is_number(value: Any) -> bool:
    """Whether the resolver can read a value as a number; a YAML file may have made a string of it."""
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
