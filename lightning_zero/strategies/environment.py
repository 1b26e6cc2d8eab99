"""The ``deepspeed`` launcher's processes as a cluster environment of Lightning."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import LightningEnvironment, LSFEnvironment, SLURMEnvironment
from lightning.pytorch.plugins.environments import ClusterEnvironment
from typing_extensions import override

from lightning_zero.errors import ConfigError

_RANK, _LOCAL_RANK, _NODE_RANK = "RANK", "LOCAL_RANK", "CROSS_RANK"
_WORLD_SIZE, _LOCAL_SIZE, _NODES = "WORLD_SIZE", "LOCAL_SIZE", "CROSS_SIZE"
_SET_BY_LAUNCHER = (_RANK, _LOCAL_RANK, _NODE_RANK, _WORLD_SIZE, _LOCAL_SIZE, _NODES, "MASTER_ADDR", "MASTER_PORT")


class DeepSpeedEnvironment(ClusterEnvironment):
    """Ranks as the ``deepspeed`` launcher numbered them, on one node or several.

    The launcher calls the node's number ``CROSS_RANK``, which Lightning's own environment does not know: on two nodes
    it would give the same ranks twice. The strategies choose this environment by themselves.
    """

    @staticmethod
    @override
    def detect() -> bool:
        """Whether the ``deepspeed`` launcher started this process."""
        return all(name in os.environ for name in _SET_BY_LAUNCHER) and "TORCHELASTIC_RUN_ID" not in os.environ

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    @override
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    @override
    def world_size(self) -> int:
        return int(os.environ[_WORLD_SIZE])

    @override
    def set_world_size(self, size: int) -> None:
        """Nothing: the launcher has decided."""

    @override
    def global_rank(self) -> int:
        return int(os.environ[_RANK])

    @override
    def set_global_rank(self, rank: int) -> None:
        """Nothing: the launcher has decided."""

    @override
    def local_rank(self) -> int:
        return int(os.environ[_LOCAL_RANK])

    @override
    def node_rank(self) -> int:
        return int(os.environ[_NODE_RANK])

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compares the Trainer's numbers with the launcher's.

        Raises:
            ConfigError: They differ, so that processes would wait for others that do not exist.
        """
        processes, nodes = int(os.environ[_LOCAL_SIZE]), int(os.environ[_NODES])
        if (num_devices, num_nodes) != (processes, nodes):
            raise ConfigError(
                f"The run has devices={num_devices}, num_nodes={num_nodes}, and the deepspeed launcher started "
                f"{processes} processes on each of {nodes} nodes. "
                f"Pass devices={processes}, num_nodes={nodes}, or start as many processes."
            )


# What Lightning chooses by itself. Batch systems count too: the `deepspeed` launcher inside an allocation leaves that
# system's variables, and they are the same for all processes of a node.
_CHOSEN_BY_DEFAULT = (LightningEnvironment, SLURMEnvironment, LSFEnvironment)


def recognise(environment: ClusterEnvironment | None) -> ClusterEnvironment | None:
    """The environment of this process: the ``deepspeed`` launcher's when that started it.

    Args:
        environment: What Lightning has chosen or the user has passed.

    Returns:
        ``environment`` itself unless it is one of Lightning's defaults and the ``deepspeed`` launcher's variables are
        there.
    """
    if type(environment) in _CHOSEN_BY_DEFAULT and DeepSpeedEnvironment.detect():
        return DeepSpeedEnvironment()
    return environment
