"""One engine from fit through evaluation to release, and nothing left behind by an evaluation."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero import ConfigError, ZeroStrategy
from tests.harness import ranks
from tests.models import Regression, largest_difference, loader, trainer, whole_weights

STAGES = [0, 1, 2, 3]


def expected_loss(module: Regression, batches: int = 6) -> float:
    """The loss over the loader by a plain copy of the module's network on one process."""
    weights = whole_weights(module)
    plain = Regression(born_sharded=False)
    plain.load_state_dict(weights)
    with torch.no_grad():
        losses = [plain.loss(batch).item() for batch in loader(batches, ranks=2)]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_fit_test_predict_fit(stage: int) -> None:
    """R1: fit, test and predict share one engine, a second fit has a fresh one, and a user's hook survives all."""
    module = Regression("sgd", born_sharded=False)
    calls = []
    module.net[0].register_forward_hook(lambda *_: calls.append(1))
    runner = trainer(ZeroStrategy(stage=stage))
    runner.fit(module, loader())
    first = runner.strategy.model
    after_fit = whole_weights(module)

    [metrics] = runner.test(module, loader(), verbose=False)
    assert runner.strategy.model is first
    assert metrics["test_loss"] == pytest.approx(expected_loss(module), abs=1e-5)
    runner.predict(module, loader())
    assert runner.strategy.model is first
    assert largest_difference(whole_weights(module), after_fit) == 0

    before = len(calls)
    other = trainer(ZeroStrategy(stage=stage), accumulate_grad_batches=3)
    other.fit(module, loader())
    assert other.strategy.model is not first
    assert len(calls) == before + 12
    assert other.strategy.resolved.config["gradient_accumulation_steps"] == 3


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_second_fit_of_one_trainer_starts_afresh(stage: int) -> None:
    """R1: a second fit starts from the module's weights with fresh optimizers, as under ddp."""

    def twice(strategy: Any) -> Any:
        module = Regression("adamw")
        runner = trainer(strategy, epochs=1)
        runner.fit(module, loader())
        runner.fit_loop.epoch_progress.reset()
        runner.fit_loop.max_epochs = 1
        runner.fit(module, loader())
        return whole_weights(module)

    assert largest_difference(twice(ZeroStrategy(stage=stage)), twice("ddp")) < 1e-5


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@ranks(2)
def test_validate_before_fit_leaves_nothing_behind(stage: int, precision: str) -> None:
    """R1: after a validate, parameters, hooks and parameter dictionaries are those from before."""
    module = Regression("sgd", born_sharded=False)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    identities = [id(parameter) for parameter in module.parameters()]
    attributes = {name: set(vars(parameter)) for name, parameter in module.named_parameters()}
    runner = trainer(ZeroStrategy(stage=stage), precision=precision)
    [metrics] = runner.validate(module, loader(), verbose=False)
    tolerance = 1e-5 if precision == "32-true" else 0.05
    assert metrics["val_loss"] == pytest.approx(expected_loss(module), rel=tolerance)
    assert runner.strategy.optimizers == []
    assert [id(parameter) for parameter in module.parameters()] == identities
    for name, parameter in module.named_parameters():
        if precision == "32-true" or stage < 3:
            assert torch.equal(parameter, before[name]), name
        assert set(vars(parameter)) == attributes[name], name
    for child in module.modules():
        assert not child._forward_hooks and not child._forward_pre_hooks and not child._backward_hooks
        assert type(child._parameters) is type(nn.Linear(1, 1)._parameters)

    fitted, fresh = trainer(ZeroStrategy(stage=stage)), Regression("sgd")
    trainer(ZeroStrategy(stage=stage)).fit(fresh, loader())
    fitted.fit(module, loader())
    if precision == "32-true" or stage < 3:
        assert largest_difference(whole_weights(module), whole_weights(fresh)) < 1e-7


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_evaluation_of_a_model_born_sharded(stage: int) -> None:
    """Validate, test and predict without fit work on a model that ``configure_model`` builds, also twice."""
    module = Regression("sgd")
    runner = trainer(ZeroStrategy(stage=stage))
    for _ in range(2):
        [metrics] = runner.validate(module, loader(), verbose=False)
        assert metrics["val_loss"] == pytest.approx(expected_loss(module), abs=1e-5)
    predictions = runner.predict(module, loader())
    assert predictions is not None and len(predictions) == 6
    runner.fit(module, loader())
    assert runner.global_step == 12


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_release_frees_the_engine(stage: int) -> None:
    """``release`` ends the engine: it can be collected, and a model that was whole before is whole again."""
    module = Regression("adamw", born_sharded=False)
    runner = trainer(ZeroStrategy(stage=stage))
    runner.fit(module, loader())
    trained = whole_weights(module)
    engine = weakref.ref(runner.strategy.model)
    runner.strategy.release()
    gc.collect()
    assert engine() is None
    assert runner.strategy.model is module
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, trained[name])


@ranks(2)
def test_teardown_does_not_move_the_module() -> None:
    """R1: the base class's teardown, which moves module and optimizer to the CPU, is not run after a fit."""
    moves = []

    class Watched(Regression):
        def cpu(self) -> Any:
            moves.append("cpu")
            return super().cpu()

    module = Watched("adamw")
    trainer(ZeroStrategy(stage=2)).fit(module, loader())
    assert moves == []


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_bf16_fit_test_predict(stage: int) -> None:
    """P2: fit, test and predict in bf16 in one Trainer; the tested loss is that of the 16-bit weights."""
    module = Regression("sgd")
    runner = trainer(ZeroStrategy(stage=stage), precision="bf16-mixed")
    runner.fit(module, loader())
    [metrics] = runner.test(module, loader(), verbose=False)
    assert metrics["test_loss"] == pytest.approx(expected_loss(module), rel=0.05)
    predictions = runner.predict(module, loader())
    assert predictions is not None and predictions[0].dtype == torch.bfloat16


def test_resolved_needs_a_run() -> None:
    """Asking for the resolved config before a run names the calls that resolve it."""
    with pytest.raises(ConfigError, match=r"trainer\.fit"):
        _ = ZeroStrategy().resolved


@ranks(2)
def test_an_exception_in_training_leaves_a_usable_trainer() -> None:
    """After a training step that raises, another fit of the same module works."""

    class Raises(Regression):
        broken = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.broken and batch_idx == 3:
                raise RuntimeError("planned")
            return super().training_step(batch, batch_idx)

    module = Raises("sgd")
    with pytest.raises(RuntimeError, match="planned"):
        trainer(ZeroStrategy(stage=3), accumulate_grad_batches=2).fit(module, loader())
    module.broken = False
    runner = trainer(ZeroStrategy(stage=3))
    runner.fit(module, loader())
    assert runner.global_step == 12
