"""Whole weights from a checkpoint are the live engine's, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_zero.checkpoint.consolidate import load_full_state_dict
from lightning_zero.checkpoint.verify import verify_checkpoint
from tests.checkpoint.runs import VARIANTS, Case, save_runs
from tests.harness import run_ranks

CASES = [
    *(Case(name, stage, "fp32") for name in VARIANTS for stage in range(4) if name != "fp32-gradients"),
    Case(
        "fp32-gradients", 1, "bf16"
    ),  # DeepSpeed has an optimizer of its own for this, and its converter cannot read it
    Case("offloaded", 2, "bf16"),
    Case("offloaded", 3, "bf16"),
    *(Case(name, stage, "bf16") for name in ("everything", "frozen", "excluded", "buffers") for stage in range(4)),
]
CASES.remove(Case("empty", 3, "fp32"))  # DeepSpeed cannot gather an empty parameter
CASES.remove(Case("offloaded", 0, "fp32"))

Runs = tuple[Path, int]


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda n: f"{n}r")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp(f"runs-{request.param}")
    run_ranks(save_runs, request.param, folder, CASES, timeout=300)
    return folder, request.param


def saved(runs: Runs) -> Iterator[tuple[Case, Path, dict[str, dict[str, torch.Tensor]]]]:
    """Each case, its checkpoint, and what the engine held."""
    folder, _ = runs
    for case in CASES:
        yield case, folder / str(case), torch.load(folder / f"{case}.pt", weights_only=True)


def test_masters_are_the_live_ones(runs: Runs) -> None:
    """W3, W4, W11: every stage, variant and number of ranks gives the engine's own fp32 weights, in one dtype
    throughout.
    """
    for case, checkpoint, live in saved(runs):
        weights = load_full_state_dict(checkpoint)
        assert set(weights) == set(live["expected"]), case
        for name, expected in live["expected"].items():
            actual = weights[name]
            wanted = torch.float32 if expected.is_floating_point() else expected.dtype
            assert actual.dtype == wanted, (case, name)
            assert torch.equal(actual, expected.to(wanted)), (case, name)


def test_names_are_the_state_dicts(runs: Runs) -> None:
    """W1, W2, W5: the names, in order, are those of `module.state_dict()`: tied and aliased ones, persistent buffers
    only.
    """
    for case, checkpoint, live in saved(runs):
        assert list(load_full_state_dict(checkpoint)) == list(live["expected"]), case


def test_deepspeeds_converter_agrees(runs: Runs) -> None:
    """What DeepSpeed's converter finds is equal; it leaves out frozen weights at stage 1 and knows no stage 0."""
    for case, checkpoint, live in saved(runs):
        weights = load_full_state_dict(checkpoint)
        unknown = set(live["converted"]) - set(weights)
        assert not unknown, case
        for name, converted in live["converted"].items():
            if converted.shape == weights[name].shape:  # it mistakes empty parameters for one another
                assert torch.equal(weights[name], converted.to(weights[name].dtype)), (case, name)
            else:
                assert converted.numel() == weights[name].numel() == 0, (case, name)


def test_roles_and_aliases_are_known(runs: Runs) -> None:
    """W1, W2: tied weights, aliased modules and buffers under two names are recognised, and roles told."""
    _, world_size = runs
    for case, checkpoint, _ in saved(runs):
        manifest = verify_checkpoint(checkpoint, deep=True)
        stage = case.stage
        assert (manifest.stage, manifest.world_size, manifest.step) == (stage, world_size, 3), case
        assert manifest.has_masters == (stage > 0 or case.precision == "bf16"), case
        if case.variant == "everything":
            aliases = {name: owner for name, owner in manifest.aliases.items() if not name.startswith("again.")}
            assert aliases == {"head.weight": "embed.weight", "other_counts": "counts"}, case
            assert manifest.aliases["again.0.bias"] == "block.0.bias", case
            roles = {tensor.name: tensor.role for tensor in manifest.tensors}
            assert roles["flags"] == roles["other_counts"] == "buffer", case
            if stage:
                assert roles["middle.weight"] == "frozen", case
                assert roles["head.weight"] == roles["again.1.weight"] == "trainable", case
