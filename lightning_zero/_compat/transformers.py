"""transformers' undocumented names, each with what it is, why it is needed and where it was last seen (5.24)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn import Module, Parameter

Gather = Callable[[Sequence[Parameter]], AbstractContextManager[None]]


@contextmanager
def gathering_initialisation(gather: Gather) -> Iterator[None]:
    """Replaces ``PreTrainedModel.initialize_weights`` by one that gathers the parameters which it fills.

    Under ``zero.Init`` a parameter is sharded as soon as its module has been made, and the initialisation that a model
    runs at the end of its own constructor would fill empty tensors: torch's defaults would stay, without a word. Rank 0
    fills, the others take its numbers; all draw the same ones, so that their generators stay in step. A module that a
    checkpoint has filled (``_is_hf_initialized`` on each tensor) is passed over: nothing would be drawn for it, but its
    rules may look at the whole shape.

    Args:
        gather: A context in which parameters are whole, and after which all ranks keep rank 0's values.
    """
    from transformers import PreTrainedModel
    from transformers.initialization import guard_torch_init_functions

    def initialize_weights(model: Any) -> None:
        with torch.no_grad(), guard_torch_init_functions():
            _apply(model, model._initialize_weights, model.is_custom_code(), gather)

    original = PreTrainedModel.initialize_weights
    PreTrainedModel.initialize_weights = initialize_weights
    try:
        yield
    finally:
        PreTrainedModel.initialize_weights = original


def _apply(module: Module, fill: Callable[[Module, bool], None], custom: bool, gather: Gather) -> None:
    """Children first, each model inside by its own rules; a module's rules may also fill what its children own."""
    from transformers import PreTrainedModel

    children = list(module.children())
    for child in children:
        _apply(child, child._initialize_weights if isinstance(child, PreTrainedModel) else fill, custom, gather)
    filled = [module, *(child for child in children if not isinstance(child, PreTrainedModel))]
    parameters = [parameter for part in filled for parameter in part.parameters(recurse=False)]
    buffers = [buffer for part in filled for buffer in part.buffers(recurse=False)]
    if parameters and all(getattr(tensor, "_is_hf_initialized", False) for tensor in (*parameters, *buffers)):
        return
    with gather(parameters), _drawn_in_fp32(parameters):
        fill(module, custom)


@contextmanager
def _drawn_in_fp32(parameters: Sequence[Parameter]) -> Iterator[None]:
    """Whole 16-bit parameters are filled in fp32 and cast: a seed then gives the weights that it gives unsharded."""
    types = [(parameter, parameter.dtype) for parameter in dict.fromkeys(parameters)]
    for parameter, dtype in types:
        if dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    yield
    for parameter, dtype in types:
        parameter.data = parameter.data.to(dtype)
