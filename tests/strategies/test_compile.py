"""`torch.compile` under ZeRO."""

from __future__ import annotations

import warnings

from lightning_zero import ZeroStrategy
from tests.harness import ranks
from tests.models import Regression, body, largest_difference, loader, trainer, whole_weights


class Compiled(Regression):
    """Compiles its network in place."""

    def configure_model(self) -> None:
        if self.net is None:
            self.net = body()
            self.net.compile()


@ranks(2, timeout=240)
def test_a_module_compiled_in_place() -> None:
    """What docs/troubleshooting.md advises, `module.compile()`, gives ddp's weights at stages 2 and 3."""
    warnings.simplefilter("ignore")  # inductor has its own
    expected = Regression()
    trainer("ddp", epochs=1, gradient_clip_val=0.1).fit(expected, loader())
    for stage in (2, 3):
        module = Compiled()
        trainer(ZeroStrategy(stage=stage), epochs=1, gradient_clip_val=0.1).fit(module, loader())
        assert module.net is not None
        assert module.net._compiled_call_impl is not None
        assert largest_difference(whole_weights(module), whole_weights(expected)) < 1e-6
