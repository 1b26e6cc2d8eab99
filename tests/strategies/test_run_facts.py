"""What a Trainer and its module know, read without touching a loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from lightning_zero import RunFacts, ZeroStrategy
from lightning_zero.config.facts import Fact
from lightning_zero.strategies.run_facts import early_facts, final_facts
from tests.models import Regression, Rows, trainer


class Hyper(L.LightningModule):
    """A module that has nothing but hyper-parameters."""

    def __init__(self, **hyper_parameters: Any) -> None:
        super().__init__()
        self.save_hyperparameters(hyper_parameters)


class Untouched:
    """A loader that fails when anybody iterates over it or asks for its length."""

    batch_size = 5

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("the loader was iterated")

    def __len__(self) -> int:
        raise AssertionError("the loader was asked for its length")


class Varying(BatchSampler):
    """Batches of one row, two rows, three rows."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0], [1, 2], [3, 4, 5])

    def __len__(self) -> int:
        return 3


class Stream(IterableDataset[Any]):
    """Rows without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(Rows(8))


def connected(
    module: L.LightningModule,
    loaders: Any = None,
    datamodule: Any = None,
    fn: TrainerFn = TrainerFn.FITTING,
    **flags: Any,
) -> L.Trainer:
    """A Trainer as it is when the early pass looks at it; no process is started."""
    runner = trainer(ZeroStrategy(), **flags)
    runner.state.fn = fn
    runner.training = fn == TrainerFn.FITTING
    runner.strategy.connect(module)
    runner._data_connector.attach_data(module, train_dataloaders=loaders, datamodule=datamodule)
    return runner


def early(module: L.LightningModule, loaders: Any = None, *, micro: int | None = None, **kwargs: Any) -> RunFacts:
    return early_facts(connected(module, loaders, **kwargs), micro_batch_size=micro, auto={})


def final(module: L.LightningModule, loaders: Any = None, *, steps: bool = False, **kwargs: Any) -> RunFacts:
    runner = connected(module, loaders, **kwargs)
    return final_facts(
        early_facts(runner, micro_batch_size=None, auto={}),
        runner,
        optimizer=None,
        scheduler_from_code=False,
        needs_total_steps=steps,
    )


def of_size(size: int | None) -> DataLoader[Any]:
    return DataLoader(Rows(12), batch_size=size)


SEVERAL = "DataLoader.batch_sampler.batch_size, the largest of 2 loaders"
LOADERS = {
    "one loader": (lambda: of_size(4), Fact(4, "DataLoader.batch_sampler.batch_size")),
    "a list": (lambda: [of_size(4), of_size(6)], Fact(6, SEVERAL)),
    "a mapping": (lambda: {"a": of_size(6), "b": of_size(4)}, Fact(6, SEVERAL)),
    "a CombinedLoader": (lambda: CombinedLoader([of_size(2), of_size(3)], "max_size"), Fact(3, SEVERAL)),
    "ready batches": (lambda: DataLoader(Stream(), batch_size=None), None),
    "a stream": (lambda: DataLoader(Stream(), batch_size=7), Fact(7, "DataLoader.batch_sampler.batch_size")),
    "varying batches": (lambda: DataLoader(Rows(6), batch_sampler=Varying()), None),
    "a batch sampler": (
        lambda: DataLoader(Rows(6), batch_sampler=BatchSampler(SequentialSampler(Rows(6)), 3, drop_last=False)),
        Fact(3, "DataLoader.batch_sampler.batch_size"),
    ),
    "any iterable": (Untouched, Fact(5, "Untouched.batch_size")),
    "a list of two kinds": (
        lambda: [DataLoader(Stream(), batch_size=None), of_size(4)],
        Fact(4, SEVERAL),
    ),
}


@pytest.mark.parametrize("case", LOADERS)
def test_batch_size_of_loaders_given_to_fit(case: str) -> None:
    """K2, K3: the batch size is read from attributes, the largest of several, and None where there is none to read."""
    make, expected = LOADERS[case]
    assert early(Regression(), make()).micro_batch_size == expected
    assert final(Regression(), make()).micro_batch_size == expected


def test_an_argument_spares_the_loaders() -> None:
    """K3: with an explicit micro-batch no attribute of the loader is read."""

    class Secret:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"the loader was asked for {name}")

        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("the loader was iterated")

    assert early(Regression(), Secret(), micro=3).micro_batch_size == Fact(3, "micro_batch_size=3")


class Counting(Regression):
    """Counts how often its loader hook is called."""

    calls = 0

    def train_dataloader(self) -> Any:
        self.calls += 1
        return [of_size(2), of_size(3)]


class Data(L.LightningDataModule):
    """A datamodule whose loader needs its ``setup``."""

    def setup(self, stage: str) -> None:
        self.rows = Rows(12)

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=3)


def test_loaders_from_hooks_wait_for_the_final_pass() -> None:
    """A hook is not called by the early pass, and once by the final one."""
    module = Counting()
    assert early(module).micro_batch_size is None
    assert module.calls == 0
    assert final(module).micro_batch_size == Fact(3, SEVERAL)
    assert module.calls == 1

    data = Data()
    assert early(Regression(), datamodule=data).micro_batch_size is None
    data.setup("fit")
    assert final(Regression(), datamodule=data).micro_batch_size == Fact(3, "DataLoader.batch_sampler.batch_size")


def test_an_evaluation_has_no_micro_batch() -> None:
    """The loaders of ``validate``, ``test`` and ``predict`` say nothing about training."""
    facts = early(Regression(), of_size(4), fn=TrainerFn.VALIDATING)
    assert facts.purpose == "evaluate"
    assert facts.micro_batch_size is None


@pytest.mark.parametrize(
    ("flags", "loader", "expected"),
    [
        ({"epochs": 2}, of_size(4), 2 * 3),
        ({"epochs": 2, "accumulate_grad_batches": 2}, of_size(4), 2 * 2),
        ({"epochs": -1, "max_steps": 5}, of_size(4), 5),
        ({"epochs": 3}, DataLoader(Stream(), batch_size=4), float("inf")),
        ({"epochs": 3, "max_steps": 5}, DataLoader(Stream(), batch_size=4), 5),
        ({"epochs": -1, "max_steps": -1}, of_size(4), float("inf")),
    ],
)
def test_total_steps(flags: dict[str, Any], loader: Any, expected: float) -> None:
    """K6: the number of updates, and infinity (never -1) for a stream without ``max_steps``."""
    facts = final(Regression(), loader, steps=True, devices=1, **flags)
    assert facts.total_steps == Fact(expected, "trainer.estimated_stepping_batches")


def test_total_steps_are_not_counted_without_need() -> None:
    """C21: a run whose config does not ask for the number of updates leaves the loaders given to fit alone."""
    facts = final(Regression(), Untouched())
    assert facts.total_steps is None


def test_learning_rate_places() -> None:
    """``lr`` comes before ``learning_rate``, an attribute before a hyper-parameter, strings of YAML count."""

    class WithLr(Hyper):
        lr = 0.5

    class WithProperty(Hyper):
        @property
        def lr(self) -> float:
            raise AssertionError("there is no optimizer yet")

    attribute = Hyper(lr=0.1)
    attribute.lr = 0.3
    assert early(attribute).learning_rate == Fact(0.3, "module.lr")
    assert early(WithLr(lr=0.1)).learning_rate == Fact(0.5, "module.lr")
    assert early(Hyper(learning_rate=0.2, lr=0.1)).learning_rate == Fact(0.1, "module.hparams.lr")
    assert early(Hyper(learning_rate="3e-4")).learning_rate == Fact("3e-4", "module.hparams.learning_rate")
    assert early(WithProperty(learning_rate=0.2)).learning_rate == Fact(0.2, "module.hparams.learning_rate")
    assert early(Hyper(lr=None, learning_rate=True)).learning_rate is None
    assert early(Hyper()).learning_rate is None


def test_adam_hyper_parameters() -> None:
    """The names of the Transformers Trainer and the short ones are found among the hyper-parameters."""
    long = early(Hyper(adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6, weight_decay=0.1, warmup_ratio=0.05))
    assert long.betas == Fact([0.8, 0.9], "module.hparams.adam_beta1 and adam_beta2")
    assert long.eps == Fact(1e-6, "module.hparams.adam_epsilon")
    assert long.weight_decay == Fact(0.1, "module.hparams.weight_decay")
    assert long.warmup_steps == Fact(0.05, "module.hparams.warmup_ratio")
    short = early(Hyper(betas=(0.7, 0.8), eps="1e-7", warmup_steps=10, warmup_ratio=0.05))
    assert short.betas == Fact([0.7, 0.8], "module.hparams.betas")
    assert short.eps == Fact("1e-7", "module.hparams.eps")
    assert short.warmup_steps == Fact(10, "module.hparams.warmup_steps")
    assert early(Hyper(adam_beta2=0.95)).betas == Fact([0.9, 0.95], "module.hparams.adam_beta2")


def test_other_meanings_of_a_name_are_no_facts() -> None:
    """A noise schedule named ``betas`` or a layer's ``eps`` does not become the optimizer's."""
    module = Hyper(betas="cosine", weight_decay="none")
    module.eps = 1e-3
    facts = early(module)
    assert (facts.betas, facts.weight_decay, facts.eps) == (None, None, None)


def test_flags() -> None:
    """Every flag arrives with the words that set it."""
    facts = early(
        Hyper(), devices=3, num_nodes=2, precision="bf16-mixed", accumulate_grad_batches=4, gradient_clip_val=1
    )
    assert facts.world_size == Fact(6, "Trainer(num_nodes=2, devices=3)")
    assert facts.num_nodes == Fact(2, "Trainer(num_nodes=2)")
    assert facts.precision == Fact("bf16-mixed", "Trainer(precision='bf16-mixed')")
    assert facts.accumulate_grad_batches == Fact(4, "Trainer(accumulate_grad_batches=4)")
    assert facts.gradient_clip_val == Fact(1.0, "Trainer(gradient_clip_val=1)")
    assert facts.gradient_clip_algorithm is None
    assert facts.accelerator == "cpu"
    by_value = early(Hyper(), gradient_clip_val=0.5, gradient_clip_algorithm="value")
    assert by_value.gradient_clip_algorithm == "value"


def tiny_bert(size: int) -> Any:
    from transformers import BertConfig

    return BertConfig(hidden_size=size, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4, vocab_size=5)


def with_sizes(*sizes: int) -> Any:
    from transformers import ConvNextConfig, ConvNextModel

    return ConvNextModel(ConvNextConfig(hidden_sizes=list(sizes), depths=[1] * len(sizes), num_stages=len(sizes)))


def pair() -> Any:
    from transformers import EncoderDecoderConfig, EncoderDecoderModel

    return EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(tiny_bert(8), tiny_bert(24)))


def nested() -> Any:
    from transformers import BertModel, PretrainedConfig

    model = BertModel(tiny_bert(8))
    model.config.text_config = PretrainedConfig(hidden_size=40)
    return model


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: with_sizes(8, 16), Fact(16, "module.outer.net.config.hidden_sizes")),
        (nested, Fact(40, "module.outer.net.config.text_config.hidden_size")),
        (pair, Fact(24, "module.outer.net.config.decoder.hidden_size")),
        (lambda: torch.nn.Linear(2, 2), None),
    ],
    ids=["sizes", "text_config", "encoder and decoder", "no transformers model"],
)
def test_hidden_size(make: Any, expected: Any) -> None:
    """K7: the largest hidden size of a model two attributes deep, in its config or in one inside that."""
    module = Hyper()
    module.outer = torch.nn.Module()
    module.outer.net = make()
    assert final(module, of_size(4)).hidden_size == expected
