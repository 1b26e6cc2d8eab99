"""For how long transformers takes the models of a Trainer's run to be sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from lightning_zero.integrations.transformers import Zero3Marker
from lightning_zero.strategies.launched import LaunchedStrategy
from lightning_zero.strategies.starting import built_whole, is_stage_3


class MarkedStrategy(LaunchedStrategy):
    """Shows transformers' ZeRO-3 marker while a step runs, so that ``generate`` keeps ranks in step; not in hooks."""

    _marker: Zero3Marker | None = None

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """A context for ``configure_model`` in which a second model is built or loaded whole, on every rank.

        Keep such a model out of the LightningModule's own submodules, in a list say: whatever is among them is sharded
        when the run starts.
        """
        with built_whole():
            yield

    @contextmanager
    def generation_context(self) -> Iterator[None]:
        """A context in which ``generate`` of a sharded model may be called after ``fit``, or in a hook, on all ranks.

        Without it ranks that stop at different lengths wait for each other for ever. The steps of a run need no such
        context. Without effect below stage 3.
        """
        if not is_stage_3(self.resolved.config):
            yield
            return
        if self._marker is None:
            self._marker = Zero3Marker(self.resolved.config)
        with self._marker.shown():
            yield

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.generation_context():
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.generation_context():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.generation_context():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.generation_context():
            return super().predict_step(*args, **kwargs)
