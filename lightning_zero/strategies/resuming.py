"""Going on from a sharded checkpoint: with its own shards, or with new ones cut from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_zero.checkpoint.reshard import SavedOptimizer, saved_optimizer
from lightning_zero.engine import reshard, state
from lightning_zero.engine.session import EngineSession
from lightning_zero.errors import CheckpointError
from lightning_zero.strategies.checkpoints import Opened, client_state, while_it_is_there, whole_weights


def resume_sharded(
    session: EngineSession, opened: Opened, *, strict: bool, exclude_frozen: bool, elastic: bool, weights_call: str
) -> dict[str, Any]:
    """Loads weights and optimizer states into a training engine. Collective.

    Args:
        session: A training engine's.
        opened: A sharded checkpoint.
        strict: Whether names must be equal.
        exclude_frozen: Whether frozen parameters may be missing.
        elastic: Whether it may be of another stage or number of ranks.
        weights_call: The call that loads weights alone, for messages.

    Returns:
        What was saved beside them.

    Raises:
        CheckpointError: It does not fit, or has no optimizer states that this engine could take; on all ranks, before
            anything is changed.
    """
    manifest, location = opened.manifest, opened.location
    assert location.tag is not None
    if not manifest.has_optimizer:
        raise CheckpointError(
            f"{manifest.path} holds no optimizer states to go on from. "
            f"Start a new training from its weights with `{weights_call}`."
        )
    saved, here = (manifest.stage, manifest.world_size), (session.stage, dist.get_world_size())
    same = saved == here or saved[0] == here[0] == 0  # at stage 0 nothing is sharded
    if not same and not elastic:
        raise CheckpointError(
            f"{manifest.path} was saved at stage {saved[0]} by {saved[1]} ranks, and this run has stage {here[0]} and "
            f"{here[1]} ranks. Use the same stage and number of processes, or elastic=True, or `{weights_call}`."
        )
    shapes = {tensor.name: tuple(tensor.shape) for tensor in manifest.tensors}
    missing_frozen = exclude_frozen or bool(manifest.left_out)
    state.check_weights(session.module, shapes, strict=strict, where=str(manifest.path), missing_frozen=missing_frozen)
    if not same:
        return _reshard(session, opened, weights_call)
    loaded = state.load_shards(session.engine, location.root, location.tag)
    session.follow_loaded_groups()
    return loaded


def _reshard(session: EngineSession, opened: Opened, weights_call: str) -> dict[str, Any]:
    def read(opened: Opened) -> tuple[dict[str, Any], Mapping[str, Tensor], SavedOptimizer]:
        return client_state(opened), whole_weights(opened), saved_optimizer(opened.location)

    client, weights, optimizer = while_it_is_there(opened, read)
    manifest = opened.manifest
    reshard.check_reshardable(session.engine, optimizer, where=str(manifest.path), weights_call=weights_call)
    masters = session.masters
    rank_zero_info(
        f"{manifest.path} was saved at stage {manifest.stage} by {manifest.world_size} ranks, and is cut anew for "
        f"stage {session.stage} and {dist.get_world_size()} ranks."
    )
    state.set_weights(session.module, weights, masters=masters)
    reshard.set_optimizer_state(session.engine, session.module, optimizer)
    return client
