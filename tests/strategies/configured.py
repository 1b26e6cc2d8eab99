"""A module with hyper-parameters that leaves optimizer and scheduler to the config, or gives them, as a test says."""

from __future__ import annotations

from typing import Any, Literal

from tests.models import Regression


class Configured(Regression):
    """Regression with hyper-parameters.

    Args:
        gives: What ``configure_optimizers`` returns.
        hyper_parameters: Saved as such.
    """

    def __init__(self, gives: Literal["nothing", "optimizer", "both"] = "nothing", **hyper_parameters: Any) -> None:
        super().__init__("adamw", scheduler=gives == "both")
        self.gives = gives
        self.save_hyperparameters(hyper_parameters)

    def configure_optimizers(self) -> Any:
        return None if self.gives == "nothing" else super().configure_optimizers()
