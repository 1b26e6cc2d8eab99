"""The state dict of a sharded module, which would hold empty tensors without a word."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn import Module

from lightning_zero.engine.partition import is_partitioned, numel
from lightning_zero.errors import CheckpointError

_REMEDY = "_zero_state_dict_remedy"  # on a module that has the hook
_WRITING = "_zero_writes_shards"  # on a module whose engine is asking


def refuse_empty_state_dict(module: Module, remedy: str) -> None:
    """Lets ``module.state_dict()`` raise while parameters are sharded, and work once they are whole.

    Args:
        module: The outermost module. ``state_dict(keep_vars=True)``, which asks for the shards, is left alone.
        remedy: What to write instead, a sentence.
    """
    if _REMEDY not in vars(module):
        module.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]
    vars(module)[_REMEDY] = remedy


@contextmanager
def written_as_shards(module: Module) -> Iterator[None]:
    """A context in which DeepSpeed saves: it asks for the state dict, and writes the shards beside it."""
    vars(module)[_WRITING] = True
    try:
        yield
    finally:
        vars(module).pop(_WRITING)


def _refuse(module: Module, prefix: str, keep_vars: bool) -> None:
    if prefix or keep_vars or _WRITING in vars(module):
        return
    for name, parameter in module.named_parameters():
        if is_partitioned(parameter) and parameter.numel() < numel(parameter):
            raise CheckpointError(
                f"{type(module).__name__}.state_dict() would hold empty tensors such as {name!r}, since stage 3 has "
                f"sharded the model. {vars(module)[_REMEDY]}"
            )
