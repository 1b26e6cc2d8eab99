"""The keys that DeepSpeed knows: what belongs under each, their other spellings, the nearest one to a misspelling."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Final

from lightning_zero.config.values import Kind

__all__ = [
    "ALIASES",
    "CLOSED_SECTIONS",
    "KINDS",
    "LEFT_TO_DEEPSPEED",
    "SECTIONS",
    "known_keys",
    "left_to_deepspeed",
    "nearest",
]

_OFFLOAD: Final[Mapping[Kind, str]] = {
    "integer": "buffer_count",
    "boolean": "pin_memory",
    "text": "device nvme_path",
}

_KEYS: Final[Mapping[str, Mapping[Kind, str]]] = {
    "": {
        "count": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps sequence_parallel_size",
        "integer": "vocabulary_size",
        "number": "gradient_clipping gradient_predivide_factor steps_per_print",
        "boolean": "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer managed_gradient_accumulation "
        "prescale_gradients disable_allgather dump_state disable_python_gc wall_clock_breakdown memory_breakdown "
        "dataloader_drop_last use_data_before_expert_parallelism ddp_bf16",
        "text": "communication_data_type seq_parallel_communication_data_type gradient_allreduce_op log_level",
        "section": "zero_optimization fp16 bf16 optimizer scheduler aio checkpoint data_types pipeline "
        "activation_checkpointing comms_logger tensorboard wandb csv_monitor comet flops_profiler autotuning "
        "data_efficiency compile timers datastates_ckpt tensor_parallel expert_parallel hybrid_engine "
        "weight_quantization torch_autocast",
        "any": "checkpoint_writer data_parallel_group global_rank nebula compression_training amp quantize_training "
        "sparse_gradients eigenvalue sparse_attention elasticity graph_harvesting curriculum_learning "
        "progressive_layer_drop",
    },
    "zero_optimization": {
        "integer": "stage reduce_bucket_size allgather_bucket_size sub_group_size stage3_prefetch_bucket_size "
        "stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters "
        "stage3_max_reuse_distance stage3_module_granularity_threshold zero_hpz_partition_size",
        "boolean": "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions "
        "overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint cpu_offload cpu_offload_param "
        "cpu_offload_use_pin_memory stage3_gather_16bit_weights_on_model_save stage3_use_all_reduce_for_fetch_params "
        "stage3_allgather_sequential ignore_unused_parameters legacy_stage1 round_robin_gradients "
        "parameter_alignment zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients "
        "memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings "
        "enable_sanity_checks save_muon_momentum_buffer_in_memory",
        "section": "offload_optimizer offload_param zenflow leaf_module",
        "any": "mics_shard_size mics_hierarchical_params_gather zeropp_loco_param",
    },
    "zero_optimization.offload_optimizer": {
        **_OFFLOAD,
        "number": "ratio cpuadam_cores_perc",
        "boolean": "pin_memory pipeline_read pipeline_write fast_init super_offload",
    },
    "zero_optimization.offload_param": {**_OFFLOAD, "integer": "buffer_count buffer_size max_in_cpu"},
    "fp16": {
        "integer": "initial_scale_power loss_scale_window hysteresis min_loss_scale",
        "number": "loss_scale",
        "boolean": "enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads",
    },
    "bf16": {
        "boolean": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads "
        "bf16_optimizer_states",
    },
    "optimizer": {"text": "type", "section": "params", "boolean": "legacy_fusion"},
    "optimizer.params": {"number": "lr eps weight_decay muon_lr adam_lr momentum", "numbers": "betas"},
    "scheduler": {"text": "type", "section": "params"},
    "scheduler.params": {
        "count": "total_num_steps",
        "updates": "warmup_num_steps",
        "per_group": "warmup_min_lr warmup_max_lr",
        "number": "warmup_min_ratio cos_min_ratio",
    },
    "tensor_parallel": {"integer": "autotp_size"},
    "aio": {
        "integer": "block_size queue_depth intra_op_parallelism",
        "boolean": "single_submit overlap_events use_gds",
    },
}

KINDS: Final[Mapping[str, Kind]] = {
    f"{section}.{key}" if section else key: kind
    for section, kinds in _KEYS.items()
    for kind, keys in kinds.items()
    for key in keys.split()
}
"""What belongs under each known dotted key."""

SECTIONS: Final = frozenset(key for key, kind in KINDS.items() if kind == "section")
"""Dotted keys under which a mapping belongs."""

CLOSED_SECTIONS: Final = frozenset(_KEYS) - {"optimizer.params", "scheduler.params", "tensor_parallel"}
"""Sections whose every key is listed here (``""`` is the top level), so that another key in them is a misspelling."""

ALIASES: Final[Mapping[str, str]] = {
    "bfloat16": "bf16",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    **{
        f"zero_optimization.{name}": f"zero_optimization.stage3_{name}"
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    },
}
"""Other spellings that DeepSpeed accepts, and the one that counts."""

LEFT_TO_DEEPSPEED: Final = (
    "data_types.keep_in_fp32_modules",
    "zero_optimization.zenflow.select_strategy",
    "zero_optimization.zenflow.select_interval",
    "zero_optimization.zenflow.update_interval",
    "pipeline.stages",
    "expert_parallel.*",
)


def left_to_deepspeed(path: str) -> bool:
    """Whether DeepSpeed itself understands ``"auto"`` at this dotted key."""
    return any(fnmatchcase(path, pattern) for pattern in LEFT_TO_DEEPSPEED)


def known_keys(section: str) -> tuple[str, ...]:
    """The last parts of the known dotted keys directly inside a section (``""``: the top level)."""
    names = [*KINDS, *ALIASES]
    return tuple(name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == section)


def nearest(word: str, words: Iterable[str], *, cutoff: float = 0.85) -> str | None:
    """The word most like another one, or None when none is ``cutoff`` (0 to 1) like it."""
    matches = difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)
    return matches[0] if matches else None
