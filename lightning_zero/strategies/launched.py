"""How the processes of a Trainer's run come to be, and to one process group."""

from __future__ import annotations

from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DeepSpeedStrategy
from typing_extensions import override

from lightning_zero.config.resolve import ResolvedConfig
from lightning_zero.strategies.environment import recognise
from lightning_zero.strategies.starting import build_ops, join_ranks, needs_launcher


class LaunchedStrategy(DeepSpeedStrategy):
    """Starts processes, or recognises who started them, and joins them."""

    _cluster_environment: ClusterEnvironment | None = None

    @property
    def resolved(self) -> ResolvedConfig:
        """The config that DeepSpeed gets, and where each value came from."""
        raise NotImplementedError

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """Who started the processes; the ``deepspeed`` launcher is recognised by its variables."""
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, environment: ClusterEnvironment | None) -> None:
        self._cluster_environment = recognise(environment)

    @override
    def _configure_launcher(self) -> None:
        if needs_launcher(self.num_processes * self.num_nodes):
            super()._configure_launcher()

    @override
    def setup_distributed(self) -> None:
        build_ops(
            self.resolved.config, device=self.root_device, devices=self.parallel_devices, local_rank=self.local_rank
        )
        super(DeepSpeedStrategy, self).setup_distributed()
        join_ranks(
            self.resolved.config,
            backend=self._get_process_group_backend(),
            local_rank=self.local_rank,
            timeout=self._timeout,
        )
