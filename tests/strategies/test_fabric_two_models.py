"""Two models with an optimizer each in one Fabric: each optimizer steps its own engine, once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_zero import ConfigError, FabricZeroStrategy
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


@ranks(2)
def test_through_a_frozen_model() -> None:
    """Gradients go through a model that was set up for inference to the one that trains, as in plain torch."""
    plain, judge = generator(), critic().requires_grad_(False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for round_ in range(ROUNDS):
        judge(plain(data(round_)[0])).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = whole_weights(plain)
    for stage in (0, 2, 3):
        fabric = launched(FabricZeroStrategy(stage=stage))
        with fabric.init_module():
            made, frozen = generator(), critic().requires_grad_(False)
        model, optimizer = fabric.setup(made, torch.optim.SGD(made.parameters(), lr=0.1))
        score = fabric.setup(frozen)
        for round_ in range(ROUNDS):
            fabric.backward(score(model(data(round_)[0][fabric.global_rank :: 2])).mean(), model=model)
            optimizer.step()
        assert largest_difference(whole_weights(made), expected) < 1e-6, stage
        fabric.strategy.release()


@ranks(1)
def test_two_models_on_nvme(nvme_ops: None, tmp_path: Path) -> None:
    """A second model whose engine would delete the swap files of the first is refused, until the first is released."""
    fabric = launched(FabricZeroStrategy(preset="zero3_nvme", nvme_path=tmp_path), devices=1)
    with fabric.init_module():
        first, second = nn.Linear(128, 128), nn.Linear(128, 128)
    fabric.setup(first, torch.optim.AdamW(first.parameters()))
    with pytest.raises(ConfigError, match=r"Linear swaps to NVMe already.*release"):
        fabric.setup(second, torch.optim.AdamW(second.parameters()))
    fabric.strategy.release()
    fabric.setup(second, torch.optim.AdamW(second.parameters()))
