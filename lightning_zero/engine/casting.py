"""The 16-bit weights of an evaluation without an engine, which leaves the module as it was."""

from __future__ import annotations

import torch
from torch.nn import Module, Parameter


class EvaluationCast:
    """Parameters on the device in the evaluation's dtype, their originals kept where they were.

    An engine would cast the module for good, and a training after the evaluation would start from rounded weights.

    Args:
        module: The module to evaluate.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._originals: list[tuple[Parameter, torch.Tensor]] = []
        self._homes: list[tuple[torch.Tensor, torch.device]] = []

    def apply(self, device: torch.device, dtype: torch.dtype | None) -> None:
        """Casts floating-point parameters; buffers move and keep their dtype, as an engine has it.

        Args:
            device: Where the evaluation runs.
            dtype: The type of the weights; ``None`` leaves it.
        """
        if self._originals:
            return
        for parameter in self._module.parameters():
            self._originals.append((parameter, parameter.data))
            wanted = dtype if parameter.is_floating_point() else None
            parameter.data = parameter.data.to(device=device, dtype=wanted)
        for buffer in self._module.buffers():
            self._homes.append((buffer, buffer.device))
            buffer.data = buffer.data.to(device)

    def undo(self) -> None:
        """Gives the module its own parameters back, and puts its buffers where they were, with what they hold now."""
        for parameter, original in self._originals:
            parameter.data = original
        for buffer, home in self._homes:
            buffer.data = buffer.data.to(home)
        self._originals.clear()
        self._homes.clear()
