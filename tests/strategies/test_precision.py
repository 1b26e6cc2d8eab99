"""What each precision means for parameters, buffers, batches, outputs and metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_zero import ConfigError, ZeroStrategy
from tests.harness import ranks
from tests.models import Regression, Rows, trainer

FP32, BF16 = torch.float32, torch.bfloat16

# precision -> parameters, buffers, floating-point tensors of a batch, what the network returns
TABLE = {
    "32-true": (FP32, FP32, FP32, FP32),
    "bf16-mixed": (BF16, FP32, BF16, BF16),
    "bf16-true": (BF16, BF16, BF16, BF16),
}
TINY = 1e-8  # as a target; bf16 holds 1.0000e-08 as 1.0012e-08


class Watched(Regression):
    """Notes types, and has metrics of its own.

    Args:
        metrics_first: Make the metrics in ``__init__``, not in ``configure_model``.
    """

    def __init__(self, *, metrics_first: bool = False) -> None:
        super().__init__("sgd", scheduler=False)
        self.seen: dict[str, tuple[torch.dtype, ...]] = {}
        self.targets: list[Tensor] = []
        self.totals: dict[str, float] = {}
        self.metrics_first = metrics_first
        if metrics_first:
            self.make_metrics()

    def make_metrics(self) -> None:
        self.sums = nn.ModuleDict({"sum": SumMetric(), "mean": MeanMetric()})
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            self.register_buffer("scale", torch.tensor([1.5], dtype=FP32))
            if not self.metrics_first:
                self.make_metrics()

    def note(self, stage: str, batch: Any) -> Tensor:
        rows, targets = batch
        rows = rows.to(self.net[0].weight.dtype)  # type: ignore[index, union-attr]  # no more than a view, unless asked for
        output = self(rows)
        parameter = next(self.parameters())
        self.seen[stage] = (parameter.dtype, self.scale.dtype, batch[0].dtype, output.dtype)  # type: ignore[union-attr]
        self.targets.append(targets)
        self.sums["sum"].update(torch.ones(1, dtype=output.dtype))
        self.sums["mean"].update(torch.tensor(1.001, dtype=FP32))
        self.accuracy.update(output, targets.argmax(1))
        return nn.functional.mse_loss(output.float(), targets.float())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.note("fit", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.note("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.note("predict", batch)

    def on_train_end(self) -> None:
        self.totals = {name: metric.compute().item() for name, metric in self.sums.items()}


@ranks(2)
def test_types_of_each_precision() -> None:
    """P1, P2, P5: fit, test and predict in one Trainer at stages 2 and 3 see the documented types. Metric states keep
    fp32, whether the metric is made in ``__init__`` or in ``configure_model``: 300 ones on each rank sum to 600, where
    bf16 stops at 256, a mean of 1.001 does not read 1.0, and counts stay integers.
    """
    for precision, expected in TABLE.items():
        for stage in (2, 3):
            module = Watched(metrics_first=stage == 2)
            run = trainer(ZeroStrategy(stage=stage), epochs=1, precision=precision)
            rows = 600 if precision == "bf16-true" else 6
            run.fit(module, DataLoader(Rows(rows), batch_size=1))
            short = DataLoader(Rows(4), batch_size=1)
            run.test(module, short, verbose=False)
            run.predict(module, short)
            assert module.seen == dict.fromkeys(("fit", "test", "predict"), expected), (precision, stage)
            assert module.totals["sum"] == rows
            assert module.totals["mean"] == pytest.approx(1.001, abs=1e-4)
            assert module.sums["sum"].sum_value.dtype == FP32
            assert module.accuracy.tp.dtype == torch.int64
            assert {target.dtype for target in module.targets} == {expected[2]}


@ranks(1)
def test_a_batch_keeps_its_types_when_asked() -> None:
    """P3: under ``bf16-mixed`` a target of 1e-8 is rounded to bf16 by default, and with ``cast_batch=False`` it arrives
    as it is; fp16, which this machine's processor has not, is refused by name.
    """
    rows, targets = torch.randn(2, 7), torch.full((2, 3), TINY)
    data = DataLoader([(rows[0], targets[0]), (rows[1], targets[1])], batch_size=2)  # type: ignore[arg-type]
    seen = {}
    for cast in (True, False):
        module = Watched()
        strategy = ZeroStrategy(stage=2, cast_batch=cast)
        run = trainer(strategy, devices=1, epochs=1, precision="bf16-mixed")
        run.fit(module, data)
        seen[cast] = module.targets[0]
    assert seen[True].dtype == BF16 and seen[True].float()[0, 0] != targets[0, 0]
    assert seen[False].dtype == FP32 and torch.equal(seen[False], targets)
    for precision in ("16-mixed", "16-true"):
        with pytest.raises(ConfigError, match="fp16"):
            trainer(ZeroStrategy(stage=2), devices=1, precision=precision).fit(Watched(), data)
