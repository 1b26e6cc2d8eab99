"""transformers' names around ZeRO-3, each with what it is, why it is needed and where it was last seen (5.24)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn import Module, Parameter

Gather = Callable[[Sequence[Parameter]], AbstractContextManager[None]]

# A loader that runs ahead in threads would hold the whole checkpoint, in the run's dtype, before the first shard of it
# is made. transformers reads one tensor, or one group that becomes a tensor, after the other with this variable set.
_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"


def make_marker(config: Mapping[str, Any]) -> Any:
    """An ``HfDeepSpeedConfig``, by which transformers knows that ZeRO-3 is on; nothing is marked yet.

    Its constructor marks at once, and transformers refers to it weakly: who wants it marked keeps it.
    """
    from transformers.integrations import HfDeepSpeedConfig

    with marked(None):
        return HfDeepSpeedConfig(dict(config))


@contextmanager
def marked(marker: Any | None) -> Iterator[None]:
    """The marker is this one inside, or none at all, and afterwards what it was before.

    ``_hf_deepspeed_config_weak_ref`` holds it; nothing public gives the object back.
    """
    from transformers.integrations import deepspeed

    before = deepspeed._hf_deepspeed_config_weak_ref
    if marker is None:
        deepspeed.unset_hf_deepspeed_config()
    else:
        deepspeed.set_hf_deepspeed_config(marker)
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = before


@contextmanager
def inside_zero_init() -> Iterator[None]:
    """To be entered around ``zero.Init``: models of transformers are built in it without another one of their own.

    ``set_zero3_state`` says that one is active, so that no second swapper for NVMe is made, and none of those paths is
    taken on which rank 0 alone draws random numbers.
    """
    from transformers.modeling_utils import set_zero3_state

    with set_zero3_state():
        yield


@contextmanager
def loading_into_shards(
    gather: Gather, *, whole_shape: Callable[[Any], torch.Size | None], writer: bool
) -> Iterator[None]:
    """Replaces the part of ``from_pretrained`` that puts a checkpoint's tensors into a sharded model.

    transformers' own for ZeRO-3 passes over unexpected and mismatched names and raises size errors on rank 0 alone.
    This one is transformers' loader for whole models, with the last step of it exchanged: each tensor goes into its
    parameter while that is gathered. All ranks go through the same names and shapes, so they find the same faults;
    the values are read by one of them.

    Args:
        gather: A context in which parameters are whole, and after which all ranks keep the writer's values.
        whole_shape: Shape of a sharded parameter; ``None`` for any other tensor.
        writer: Whether this rank's values are those that are kept.
    """
    from transformers import PreTrainedModel, initialization, modeling_utils
    from transformers.modeling_utils import is_deepspeed_zero3_enabled

    init_context = PreTrainedModel.__dict__["get_init_context"].__func__
    load = PreTrainedModel._load_pretrained_model
    initialize_missing = PreTrainedModel._initialize_missing_keys
    equal = modeling_utils._tied_params_are_equal

    def get_init_context(cls: Any, *args: Any, **kwargs: Any) -> list[Any]:
        contexts = init_context(cls, *args, **kwargs)
        # Whole models are made on the meta device, where nothing is drawn either.
        return [*contexts, initialization.no_init_weights()] if is_deepspeed_zero3_enabled() else list(contexts)

    def load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if load_config.is_quantized or not is_deepspeed_zero3_enabled():
            return load(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        tensors = _tensors(checkpoint_files, load_config) if state_dict is None else state_dict
        return _fill(model, tensors, load_config, gather, whole_shape, writer)

    def initialize_missing_keys(model: Any, is_quantized: bool) -> None:
        if is_quantized or not is_deepspeed_zero3_enabled():
            initialize_missing(model, is_quantized)
        else:
            model.initialize_weights()  # gathers what is missing, module after module

    def tied_params_are_equal(source: Any, target: Any) -> bool:
        with gather([source, target]):
            return bool(equal(source, target))

    with (
        _attribute(PreTrainedModel, "get_init_context", classmethod(get_init_context)),
        _attribute(PreTrainedModel, "_load_pretrained_model", staticmethod(load_pretrained_model)),
        _attribute(PreTrainedModel, "_initialize_missing_keys", initialize_missing_keys),
        _attribute(modeling_utils, "_tied_params_are_equal", tied_params_are_equal),
    ):
        yield


@contextmanager
def resizing_whole(
    *,
    make_whole: Callable[[Module, set[str] | None], None],
    shard: Callable[[Module], None],
    built_whole: Callable[[], AbstractContextManager[None]],
) -> Iterator[None]:
    """Replaces ``PreTrainedModel.resize_token_embeddings`` by itself on embeddings that are whole meanwhile.

    Its own way under ZeRO-3 takes the new embeddings to be whole while ``zero.Init`` has sharded them, and fails with
    ``mean_resizing=True``.

    Args:
        make_whole: Makes parameters of a module ordinary ones: those of these names, or all.
        shard: Shards the whole parameters of a model, of which others are sharded already.
        built_whole: A context in which models are built whole.
    """
    from transformers import PreTrainedModel
    from transformers.integrations import is_deepspeed_zero3_enabled

    original = PreTrainedModel.resize_token_embeddings

    def resize_token_embeddings(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_deepspeed_zero3_enabled():
            return original(model, *args, **kwargs)
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            if module is not None:
                make_whole(module, None)
        with built_whole():
            resized = original(model, *args, **kwargs)
        shard(model)
        return resized

    with _attribute(PreTrainedModel, "resize_token_embeddings", resize_token_embeddings):
        yield


def _tensors(files: Sequence[str], load_config: Any) -> dict[str, Any]:
    """Names and tensors of a checkpoint, mapped into memory and not read yet."""
    from transformers.modeling_utils import load_state_dict

    tensors: dict[str, Any] = {}
    for file in files:
        tensors.update(
            load_state_dict(file, weights_only=load_config.weights_only, disable_mmap=load_config.disable_mmap)
        )
    return tensors


def _fill(
    model: Any,
    tensors: Mapping[str, Any],
    load_config: Any,
    gather: Gather,
    whole_shape: Callable[[Any], torch.Size | None],
    writer: bool,
) -> tuple[Any, None]:
    from transformers import core_model_loading

    put_whole = core_model_loading.set_param_for_module
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    shapes = {name: whole_shape(tensor) for name, tensor in held.items()}

    def put(model: Any, name: str, value: Any, info: Any, *others: Any) -> None:
        shape = shapes.get(name)
        if shape is None:
            # ``zero.Init`` has put buffers on the device, and the engine moves nothing that was made under it.
            here = value.to(held[name].device) if name in held else value
            put_whole(model, name, here, info, *others)
            return
        info.missing_keys.discard(name)
        if value.shape != shape:
            info.mismatched_keys.add((name, value.shape, shape))
            return
        parameter = held[name]
        with torch.no_grad(), gather([parameter]):
            if writer:
                parameter.copy_(value)
        parameter._is_hf_initialized = True

    # On the meta device a tensor is cast, stacked and cut without being read.
    devices = {"": "cpu"}
    if not writer:
        devices = {"": "meta", **{name: "cpu" for name, _ in model.state_dict().items() if shapes.get(name) is None}}
    with (
        _attribute(core_model_loading, "set_param_for_module", put),
        _variable(_NO_THREADS, "1"),
    ):
        info, _ = core_model_loading.convert_and_load_state_dict_in_model(
            model=model,
            state_dict=dict(tensors),
            load_config=dataclasses.replace(load_config, device_map=devices),
            disk_offload_index=None,
        )
    return info, None


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
