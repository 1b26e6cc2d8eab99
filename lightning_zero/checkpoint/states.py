"""The files of one sharded checkpoint, opened together and checked against one another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint.layout import CLIENT_STATE_KEY, CheckpointLocation, ShardName, parse_shard_name
from lightning_zero.checkpoint.shards import ShardFile, TensorRef
from lightning_zero.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["DEEPSPEED_KEYS", "SavedStates", "open_states"]

DEEPSPEED_KEYS = frozenset(
    {
        *("module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"),
        *("optimizer", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples"),
        *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version"),
        *("universal_checkpoint_info", "ds_autoep_layers", "autoep_layers", "folding", "num_experts"),
        *("sparse_tensor_module_names", "csr_tensor_module_names"),
    }
)
"""What ``DeepSpeedEngine.save_checkpoint`` puts beside the client state in a model file."""


@dataclass(frozen=True)
class SavedStates:
    """A sharded checkpoint's files, their pickles read.

    Args:
        location: Where they lie.
        stage: ZeRO stage of the run that saved it.
        world_size: Number of ranks that saved it.
        model: What each model file holds: one entry below stage 3, one for each rank at stage 3.
        optim: The ``optimizer_state_dict`` of each rank; empty when the optimizer was not saved.
        files: Each shard's path and name, in the order model 0, 1, ..., optim 0, 1, ...
    """

    location: CheckpointLocation
    stage: int
    world_size: int
    model: tuple[Mapping[str, Any], ...]
    optim: tuple[Mapping[str, Any], ...]
    files: tuple[tuple[Path, ShardName], ...]

    @property
    def client_state(self) -> dict[str, Any]:
        """Lightning's part: every key of rank 0's model file that is neither DeepSpeed's nor ours."""
        return {
            key: value for key, value in self.model[0].items() if key not in DEEPSPEED_KEYS and key != CLIENT_STATE_KEY
        }


@dataclass
class _Opened:
    """Shards by rank, and what is wrong with them."""

    model: dict[int, tuple[Path, Any]] = field(default_factory=dict)
    optim: dict[int, tuple[Path, Any]] = field(default_factory=dict)
    files: list[tuple[Path, ShardName]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def open_states(location: CheckpointLocation) -> SavedStates:
    """Open every shard of a checkpoint and check that they belong together. Reads no tensor data.

    Args:
        location: A sharded checkpoint.

    Returns:
        The shards' contents.

    Raises:
        CheckpointError: Shards are missing, damaged, stray or of different saves; the message names each of them.
    """
    opened = _open_files(location.folder)
    model_ranks = sorted(opened.model)
    if not model_ranks or model_ranks[0] != 0:
        name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if model_ranks else "mp_rank_00_model_states.pt"
        raise _damaged(location, [*opened.problems, f"{name} is missing"])
    reference = opened.model[0][1]
    if not reference:
        raise _damaged(location, opened.problems)
    partitioned = any(name.role == "model" and name.rank is not None for _, name in opened.files)
    stage = 3 if partitioned else _stage(reference, opened.optim)
    world_size = int(reference.get("dp_world_size") or 1)
    problems = [*opened.problems, *_world_problems(opened, partitioned, world_size), *_save_problems(opened, stage)]
    if problems:
        raise _damaged(location, problems)
    optim = tuple(opened.optim[rank][1] for rank in sorted(opened.optim))
    order = sorted(opened.files, key=lambda item: (item[1].role, item[1].rank or 0))
    return SavedStates(
        location, stage, world_size, tuple(opened.model[rank][1] for rank in model_ranks), optim, tuple(order)
    )


def _damaged(location: CheckpointLocation, problems: list[str]) -> CheckpointError:
    kind = CheckpointNotFoundError if all(line.endswith("is missing") for line in problems) else CheckpointError
    return kind("\n".join([f"The checkpoint {location.folder} cannot be used:", *(f"  - {line}" for line in problems)]))


def _open_files(folder: Path) -> _Opened:
    opened = _Opened()
    for path in sorted(folder.iterdir()):
        name = parse_shard_name(path.name)
        if name is None:
            if path.name.startswith(("layer_", "expert_")) and path.suffix == ".pt":
                opened.problems.append(
                    f"{path.name} belongs to a pipeline or mixture-of-experts run, which is not supported"
                )
            continue
        if name.model_parallel_rank != 0:
            opened.problems.append(f"{path.name} belongs to a tensor-parallel run, which is not supported")
            continue
        shards = opened.model if name.role == "model" else opened.optim
        rank = name.rank or 0
        if rank in shards:
            opened.problems.append(
                f"{path.name} and {shards[rank][0].name} are of different runs: move the stray one away"
            )
            continue
        try:
            content = ShardFile(path).content
            required = "module" if name.role == "model" else "optimizer_state_dict"
            if not isinstance(content, Mapping) or not isinstance(content.get(required), Mapping):
                raise CheckpointError(f"{path.name} holds no {required!r}, so DeepSpeed did not write it")
        except CheckpointError as error:
            opened.problems.append(str(error).replace(f"{folder}/", "").rstrip("."))
            content = {}
        shards[rank] = (path, content if name.role == "model" else content.get("optimizer_state_dict", {}))
        opened.files.append((path, name))
    return opened


def _stage(reference: Mapping[str, Any], optim: Mapping[int, tuple[Path, Any]]) -> int:
    """The stage of a run whose weights were not partitioned."""
    for _, state in optim.values():
        if "zero_stage" in state:
            return int(state["zero_stage"])
    config = reference.get("ds_config")
    section = config.get("zero_optimization") if isinstance(config, Mapping) else None
    stage = section.get("stage") if isinstance(section, Mapping) else None
    if isinstance(stage, int):
        return int(stage)
    return 0 if reference.get("param_shapes") is None else 1


def _world_problems(opened: _Opened, partitioned: bool, world_size: int) -> Iterator[str]:
    """Every shard must be of one run, and every rank of that run must have its shards."""
    reference = opened.model[0][0].name
    for shards, whole in ((opened.model, not partitioned), (opened.optim, False)):
        if not shards or whole:
            continue
        for rank, (path, state) in sorted(shards.items()):
            saved_by = _world_size(state, world_size)
            if saved_by != world_size:
                yield (
                    f"{path.name} is of a run of {saved_by} ranks, and {reference} of a run of {world_size}: "
                    "one of them is stray"
                )
            elif rank >= world_size:
                yield f"{path.name} is stray: {reference} is of a run of {world_size} ranks"
        template = shards[min(shards)][0].name
        first = f"zero_pp_rank_{min(shards)}_"
        for rank in range(world_size):
            if rank not in shards:
                yield f"{template.replace(first, f'zero_pp_rank_{rank}_')} is missing"


def _world_size(state: Mapping[str, Any], default: int) -> int:
    if "dp_world_size" in state:
        return int(state["dp_world_size"])
    count = state.get("partition_count", default)
    return int(max(count) if isinstance(count, (list, tuple)) else count)


def _save_problems(opened: _Opened, stage: int) -> Iterator[str]:
    """Every shard must be of one save: steps and stages are compared."""
    for shards, read, what in ((opened.model, _engine_step, "step"), (opened.optim, _optimizer_step, "optimizer step")):
        known = [(path, read(state)) for path, state in (shards[rank] for rank in sorted(shards))]
        values = [(path, value) for path, value in known if value is not None]
        for path, value in values[1:]:
            if value != values[0][1]:
                first = f"{values[0][0].name} at {what} {values[0][1]}"
                yield f"{path.name} was saved at {what} {value}, and {first}: two saves are mixed"
    for path, state in opened.optim.values():
        saved = state.get("zero_stage")
        if saved is not None and (int(saved) == 3) != (stage == 3):
            yield f"{path.name} is of a stage-{int(saved)} run, and the model files of a stage-{stage} one: two runs"


def _engine_step(state: Mapping[str, Any]) -> int | None:
    return state.get("global_steps")


def _optimizer_step(state: Mapping[str, Any]) -> float | None:
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    slots = base.get("state", {}).values() if isinstance(base, Mapping) else base if isinstance(base, list) else ()
    for slot in slots:
        step = slot.get("step") if isinstance(slot, Mapping) else None
        if isinstance(step, TensorRef) and step.numel == 1:
            return float(step.load().item())
        if isinstance(step, (int, float)):
            return float(step)
    return None
