"""The half of Fabric's strategy that saves and loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import torch
from lightning.fabric.strategies import DeepSpeedStrategy
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.engine.session import session_of
from lightning_zero.errors import CheckpointError
from lightning_zero.export.options import parse_dtype
from lightning_zero.strategies import checks, fabric_checkpoints, gathered
from lightning_zero.strategies.fabric_launched import FabricLaunchedStrategy
from lightning_zero.strategies.fabric_models import SetUpModels


class FabricCheckpointedStrategy(FabricLaunchedStrategy):
    """Saves shards or whole weights, and loads whatever a path stands for."""

    elastic: bool
    _models: SetUpModels

    @override
    def save_checkpoint(
        self,
        path: str | PathLike[str],
        state: Mapping[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,  # Lightning's name
    ) -> None:
        """Saves one model that is trained, its optimizer, and the rest of the state, to a folder. Collective.

        Args:
            path: The folder. What is there lives until the new one is whole.
            state: One model of ``fabric.setup``, and anything that can be pickled or has a ``state_dict``.
            storage_options: Not supported.
            filter: As in Lightning, for entries that are not sharded.

        Raises:
            ConfigError: No model in the state, several, or a filter of what is sharded.
            CheckpointError: It could not be written; an earlier one of that name is untouched.
        """
        checks.no_storage_options(storage_options)
        fabric_checkpoints.save(
            self._models,
            path,
            state,
            filters=filter,
            exclude_frozen=self.exclude_frozen_parameters,
        )

    @override
    def load_checkpoint(
        self,
        path: str | PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Restores a state from a checkpoint of any kind, or one module's weights. Collective.

        Raises:
            ConfigError: No model in the state, or several.
            CheckpointError: The checkpoint is damaged or does not fit; on all ranks, before anything is changed.
        """
        if isinstance(state, Module):
            fabric_checkpoints.load_raw(self._models, path, state, strict=strict)
            return {}
        if self._models.find_optimizer(state) is not None:
            raise CheckpointError(
                f"{path}: optimizer states of one rank cannot be loaded alone, since they are sharded. Load a sharded "
                'checkpoint with `fabric.load(path, {"model": model, "optimizer": optimizer})`.'
            )
        if isinstance(state, Optimizer):
            return super(DeepSpeedStrategy, self).load_checkpoint(str(path), state, strict, weights_only)
        return fabric_checkpoints.load(
            self._models,
            path,
            {} if state is None else state,
            strict=strict,
            weights_only=weights_only,
            elastic=self.elastic,
            exclude_frozen=self.exclude_frozen_parameters,
        )

    def save_gathered_weights(
        self,
        path: str | PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        module: Module | str | None = None,
        max_shard_size: int | str = "5GB",
        exclude_frozen: bool = False,
        tokenizer: Any = None,
    ) -> None:
        """Writes whole weights to a folder, as :meth:`ZeroStrategy.save_gathered_weights` does. Collective.

        Args:
            path: The folder, on a disk that all nodes share.
            dtype: Of every floating-point tensor.
            module: What ``fabric.setup`` returned; needed when several models have been set up. Or the name of a part
                of the only one.
            max_shard_size: Most bytes in one file.
            exclude_frozen: Leave frozen parameters out.
            tokenizer: A tokenizer or processor to save beside the weights.

        Raises:
            ConfigError: There is no such model or part.
            CheckpointError: Some rank could not write, or not all called; on all ranks, and nothing is left.
        """
        name = module if isinstance(module, str) else None
        owner = self._models.meant(None if name is not None else module, "save_gathered_weights(path, module={})")
        gathered.save_gathered(
            owner,
            path,
            session=session_of(owner),
            dtype=gathered.sixteen_bit(self._models.resolved(owner).config) if dtype == "auto" else parse_dtype(dtype),
            name=name,
            max_shard_size=max_shard_size,
            exclude_frozen=exclude_frozen,
            tokenizer=tokenizer,
        )
