"""The deepspeed launcher's variables, as a cluster environment."""

import pytest
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_zero import ConfigError
from lightning_zero.strategies.environment import DeepSpeedEnvironment, recognise

TWO_NODES = [(rank, rank // 2, rank % 2) for rank in range(4)]


def launched(monkeypatch: pytest.MonkeyPatch, rank: int, node: int, local_rank: int) -> None:
    """Sets what the launcher sets on the second of two processes on each of two nodes, and so on."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "CROSS_RANK": node,
        "WORLD_SIZE": 4,
        "LOCAL_SIZE": 2,
        "CROSS_SIZE": 2,
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": 29500,
    }.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(("rank", "node", "local_rank"), TWO_NODES)
def test_ranks_on_two_nodes(monkeypatch: pytest.MonkeyPatch, rank: int, node: int, local_rank: int) -> None:
    """On two nodes each process has the rank that the launcher gave it."""
    launched(monkeypatch, rank, node, local_rank)
    environment = recognise(LightningEnvironment())
    assert isinstance(environment, DeepSpeedEnvironment)
    assert (environment.global_rank(), environment.node_rank(), environment.local_rank()) == (rank, node, local_rank)
    assert environment.world_size() == 4
    assert (environment.main_address, environment.main_port) == ("10.0.0.1", 29500)
    assert environment.creates_processes_externally


def test_other_launchers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without all of the launcher's variables, or with torchrun's, nothing is replaced."""
    chosen = LightningEnvironment()
    assert recognise(chosen) is chosen
    launched(monkeypatch, 0, 0, 0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert recognise(chosen) is chosen


def test_what_the_user_passes_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that Lightning does not choose by default stays, and a batch system's gives way."""
    launched(monkeypatch, 0, 0, 0)

    class Mine(LightningEnvironment):
        pass

    mine = Mine()
    assert recognise(mine) is mine
    assert isinstance(recognise(SLURMEnvironment()), DeepSpeedEnvironment)
    assert recognise(None) is None


def test_fabric_recognises_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Fabric that the launcher started on the second node takes its ranks from there, without a plugin."""
    launched(monkeypatch, 3, 1, 1)
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # a Fabric sets it, for the whole process
    fabric = Fabric(strategy="zero2", accelerator="cpu", devices=2, num_nodes=2)
    assert isinstance(fabric.strategy.cluster_environment, DeepSpeedEnvironment)
    assert (fabric.global_rank, fabric.node_rank, fabric.local_rank, fabric.world_size) == (3, 1, 1, 4)


@pytest.mark.parametrize(("devices", "nodes"), [(2, 1), (1, 2), (4, 1)])
def test_other_numbers_are_refused(monkeypatch: pytest.MonkeyPatch, devices: int, nodes: int) -> None:
    """A Trainer whose numbers differ from the launcher's is refused, with the numbers to pass."""
    launched(monkeypatch, 0, 0, 0)
    with pytest.raises(ConfigError, match=r"Pass devices=2, num_nodes=2"):
        DeepSpeedEnvironment().validate_settings(num_devices=devices, num_nodes=nodes)
    DeepSpeedEnvironment().validate_settings(num_devices=2, num_nodes=2)
