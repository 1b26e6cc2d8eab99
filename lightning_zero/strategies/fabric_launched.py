"""How the processes of a Fabric's run come to be, and to one process group."""

from __future__ import annotations

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.strategies import DeepSpeedStrategy
from typing_extensions import override

from lightning_zero.engine import initialize
from lightning_zero.engine.accelerator import check_precision, select_accelerator
from lightning_zero.strategies import starting
from lightning_zero.strategies.environment import recognise
from lightning_zero.strategies.fabric_config import FabricConfig


class FabricLaunchedStrategy(DeepSpeedStrategy):
    """Starts processes, or recognises who started them, and joins them."""

    _fabric_config: FabricConfig
    _logging_level: int
    _cluster_environment: ClusterEnvironment | None = None

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """Who started the processes; the ``deepspeed`` launcher is recognised by its variables."""
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, environment: ClusterEnvironment | None) -> None:
        self._cluster_environment = recognise(environment)

    @override
    def _configure_launcher(self) -> None:
        if starting.needs_launcher(self.num_processes * self.num_nodes):
            super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        select_accelerator(self.root_device.type, processes=self.num_processes)
        initialize.set_log_level(self._logging_level)
        self._fabric_config.launch(self)
        check_precision(self._fabric_config.before_models.config)
        super(DeepSpeedStrategy, self).setup_environment()

    @override
    def _setup_distributed(self) -> None:
        config, local_rank = self._fabric_config.before_models.config, self.local_rank
        starting.build_ops(config, device=self.root_device, devices=self.parallel_devices, local_rank=local_rank)
        super(DeepSpeedStrategy, self)._setup_distributed()
        backend = self._get_process_group_backend()
        starting.join_ranks(config, backend=backend, local_rank=local_rank, timeout=self._timeout)
