"""Two models with an optimizer each in one Fabric: each optimizer steps its own engine, once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_zero import FabricZeroStrategy
from tests.harness import ranks
from tests.models import WIDTH, largest_difference, whole_weights
from tests.strategies.fabric_loops import launched

Backward = Callable[[Tensor, Any], None]
ROUNDS = 4


def generator() -> nn.Module:
    torch.manual_seed(21)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, WIDTH))


def critic() -> nn.Module:
    torch.manual_seed(22)
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 1))


def optimizers(made: nn.Module, judge: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return (
        torch.optim.AdamW(made.parameters(), lr=0.02),
        torch.optim.SGD(judge.parameters(), lr=0.05, momentum=0.9),
    )


def losses(g: Any, d: Any, noise: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """The critic's loss on detached samples, and the generator's through the critic; all forwards come first."""
    fake = g(noise)
    of_critic = d(fake.detach()).mean() - d(real).mean() + d(real).pow(2).mean()
    return of_critic, -d(fake).mean()


def step_at_the_end(g: Any, d: Any, opt_g: Any, opt_d: Any, backward: Backward, noise: Tensor, real: Tensor) -> None:
    of_critic, of_generator = losses(g, d, noise, real)
    backward(of_critic, d)
    backward(of_generator, g)
    opt_d.step()
    opt_g.step()
    opt_d.zero_grad()
    opt_g.zero_grad()


def take_turns(g: Any, d: Any, opt_g: Any, opt_d: Any, backward: Backward, noise: Tensor, real: Tensor) -> None:
    opt_d.zero_grad()
    backward(d(g(noise).detach()).mean() - d(real).mean() + d(real).pow(2).mean(), d)
    opt_d.step()
    opt_g.zero_grad()
    backward(-d(g(noise)).mean(), g)  # leaves gradients in the critic, which its next zero_grad drops
    opt_g.step()


def data(round_: int) -> tuple[Tensor, Tensor]:
    """Noise and real samples of both ranks, those of a rank in every second row."""
    source = torch.Generator().manual_seed(round_)
    return torch.randn(4, 3, generator=source), torch.randn(4, WIDTH, generator=source)


def expected(turn: Callable[..., None]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights by plain torch, on the data of both ranks at once."""
    g, d = generator(), critic()
    opt_g, opt_d = optimizers(g, d)
    for round_ in range(ROUNDS):
        turn(g, d, opt_g, opt_d, lambda loss, _: loss.backward(), *data(round_))
    return whole_weights(g), whole_weights(d)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks(2)
def test_gan(stage: int) -> None:
    """Two engines stepped at the end, or in turns, give what plain torch gives: each steps once, no gradient stays."""
    for turn in (step_at_the_end, take_turns):
        fabric = launched(FabricZeroStrategy(stage=stage))
        with fabric.init_module():
            made, judge = generator(), critic()
        raw_g, raw_d = optimizers(made, judge)
        g, opt_g = fabric.setup(made, raw_g)
        d, opt_d = fabric.setup(judge, raw_d)
        for round_ in range(ROUNDS):
            noise, real = (rows[fabric.global_rank :: 2] for rows in data(round_))
            turn(g, d, opt_g, opt_d, partial(backward_of, fabric), noise, real)
        of_generator, of_critic = expected(turn)
        assert largest_difference(whole_weights(made), of_generator) < 2e-6, turn.__name__
        assert largest_difference(whole_weights(judge), of_critic) < 2e-6, turn.__name__
        fabric.strategy.release()


def backward_of(fabric: Fabric, loss: Tensor, model: Any) -> None:
    fabric.backward(loss, model=model)


def two_models(fabric: Fabric) -> tuple[Any, Any, Any, Any]:
    made, judge = generator(), critic()
    raw_g, raw_d = optimizers(made, judge)
    return (*fabric.setup(made, raw_g), *fabric.setup(judge, raw_d))
