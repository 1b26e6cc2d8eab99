"""Configs resolved by real runs: in two passes, afresh for each fit, and written down."""

from __future__ import annotations

import json
import logging
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ConfigError, ZeroStrategy
from lightning_zero.config.dotted import find_auto
from tests.harness import ranks
from tests.models import WIDTH, Regression, Rows, loader, trainer
from tests.strategies.configured import Configured

LR = {"lr": 0.01}
CPU = {"device": "cpu", "pin_memory": False}
RUN = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "train_batch_size": 2 * 3 * 2,
    "gradient_clipping": 0.5,
    "steps_per_print": None,
}
FROM_CODE = {**RUN, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}
STAGE_2 = {
    "stage": 2,
    "overlap_comm": True,
    "allgather_bucket_size": 200_000_000,
    "reduce_bucket_size": 200_000_000,
    "contiguous_gradients": True,
}
STAGE_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_bucket_size": WIDTH * WIDTH,
    "stage3_prefetch_bucket_size": 44,  # int(0.9 * 49)
    "stage3_param_persistence_threshold": 10 * WIDTH,
    "stage3_gather_16bit_weights_on_model_save": True,
}
OFFLOADED = {**FROM_CODE, "zero_force_ds_cpu_optimizer": True}
PRESETS = {
    "zero1": {**FROM_CODE, "zero_optimization": {"stage": 1}},
    "zero2": {**FROM_CODE, "zero_optimization": STAGE_2},
    "zero2_offload": {**OFFLOADED, "zero_optimization": {**STAGE_2, "offload_optimizer": CPU}},
    "zero3": {**FROM_CODE, "zero_optimization": STAGE_3},
    "zero3_offload": {
        **OFFLOADED,
        "zero_optimization": {**STAGE_3, "offload_optimizer": CPU, "offload_param": CPU},
    },
}

SMALL = """{
  // works as it stands under the Transformers Trainer
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
  "fp16": {"enabled": "auto"},
}"""

SECTIONS = {
    "zero_optimization": {"stage": 2, "offload_optimizer": CPU},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
}


class HoldsTransformer(Configured):
    """A transformers model of hidden size 7, two attributes deep."""

    def configure_model(self) -> None:
        from transformers import GPT2Config, GPT2Model

        if self.net is None:
            self.net = nn.Module()
            self.net.inner = GPT2Model(GPT2Config(vocab_size=3, n_positions=4, n_embd=WIDTH, n_layer=1, n_head=1))
            self.net.head = nn.Linear(WIDTH, 3)

    def forward(self, rows: Tensor) -> Tensor:
        assert self.net is not None
        hidden = self.net.inner(inputs_embeds=rows[:, None]).last_hidden_state
        result: Tensor = self.net.head(hidden[:, 0])
        return result


def fit(strategy: Any, module: Regression, **flags: Any) -> Any:
    runner = trainer(strategy, epochs=1, **{"accumulate_grad_batches": 3, "gradient_clip_val": 0.5, **flags})
    runner.fit(module, loader())
    assert runner.global_step == 2
    assert all(map(math.isfinite, module.losses))
    return runner


@ranks(2)
def test_strategy_names() -> None:
    """Each strategy name resolves under a Trainer's flags to the config written out here, and trains."""
    for name, expected in PRESETS.items():
        runner = fit(name, HoldsTransformer("optimizer"), precision="bf16-mixed")
        assert runner.strategy.resolved.config == expected, name
        assert runner.strategy.resolved.origins["train_batch_size"] == "micro batch 2 x accumulation 3 x 2 processes"


@ranks(2)
def test_configs_of_the_transformers_trainer() -> None:
    """The smallest config, with a comment and no stage, and one with both sections, are filled, and train."""
    Path("small.json").write_text(SMALL)
    runner = fit(ZeroStrategy(preset="zero1_offload", config="small.json"), Configured(lr=0.01))
    assert runner.strategy.resolved.config == {
        **RUN,
        "zero_optimization": {"stage": 1, "offload_optimizer": CPU},
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": LR},
    }
    assert runner.strategy.resolved.origins["optimizer.params.lr"] == "module.hparams.lr"

    runner = fit(ZeroStrategy(config=SECTIONS), Configured(learning_rate=0.01, adam_beta2=0.95, warmup_ratio=0.5))
    assert runner.strategy.resolved.config == {
        **{key: value for key, value in RUN.items() if key != "train_batch_size"},
        "zero_optimization": {"stage": 2, "offload_optimizer": CPU},
        "optimizer": {
            "type": "AdamW",
            "params": {**LR, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 2, "warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 1},
        },
    }


WRONG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "train_batch_size": 64,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": "5e-5"}},
}


@ranks(2)
def test_five_contradictions_before_the_model_is_built() -> None:
    """K4, K5: five contradictions stand in one error, both values and places in each line, before configure_model."""
    module = Configured(lr=0.01)
    with pytest.raises(ConfigError) as caught:
        fit(ZeroStrategy(config=WRONG), module)
    lines = [
        ("gradient_accumulation_steps: config says 2, Trainer(accumulate_grad_batches=3) says 3.", "pass accumulate_"),
        ("train_micro_batch_size_per_gpu: config says 8, DataLoader.batch_sampler.batch_size says 2.", "make the two"),
        (
            "train_batch_size: config says 64, micro batch 2 x accumulation 3 x 2 processes says 12.",
            "change one of the",
        ),
        ("gradient_clipping: config says 1.0, Trainer(gradient_clip_val=0.5) says 0.5.", "pass gradient_clip_val"),
        ("optimizer.params.lr: config says 5e-05, module.hparams.lr says 0.01.", "make the two equal"),
    ]
    said = str(caught.value).splitlines()
    assert len(said) == len(lines)
    for line, (contradiction, remedy) in zip(said, lines, strict=True):
        assert line.startswith(f'{contradiction} Write "auto" there, or {remedy}')
    assert module.net is None


class FromHook(Configured):
    def train_dataloader(self) -> Any:
        return DataLoader(Rows(24), batch_size=2)


@ranks(2)
def test_the_final_pass_compares_what_came_late() -> None:
    """K4: a loader that a hook makes and a model's optimizer are compared when they exist, on all ranks alike."""
    micro = {"train_micro_batch_size_per_gpu": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1}}}
    with pytest.raises(ConfigError) as caught:
        trainer(ZeroStrategy(config=micro)).fit(FromHook("optimizer"))
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("train_micro_batch_size_per_gpu: config says 8, DataLoader.batch_sampler.batch_size say")
    assert "warmup_max_lr: config says 1, the optimizer of configure_optimizers says 0.02" in lines[1]


@ranks(2)
def test_loaders_that_do_not_tell() -> None:
    """K2, K3, K6: without a batch size 1 is told and said so, an argument is taken, a length is asked for."""
    batches = list(DataLoader(Rows(8), batch_size=2))
    module = Regression("sgd")
    runner = trainer(ZeroStrategy(), epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner.fit(module, DataLoader(batches, batch_size=None))
    said = [str(warning.message) for warning in caught if "so DeepSpeed is told 1" in str(warning.message)]
    assert len(said) == (runner.global_rank == 0)
    assert runner.strategy.resolved.config["train_micro_batch_size_per_gpu"] == 1
    assert runner.global_step == 2

    runner = trainer(ZeroStrategy(micro_batch_size=2), epochs=1)
    runner.fit(Regression("sgd"), DataLoader(batches, batch_size=None))
    assert runner.strategy.resolved.config["train_micro_batch_size_per_gpu"] == 2

    asked = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2}}}
    stream = DataLoader(_Stream(), batch_size=2)
    with pytest.raises(ConfigError, match=r"total_num_steps.*\"auto\".*set the Trainer.s max_steps"):
        trainer(ZeroStrategy(config=asked), max_steps=-1).fit(Configured("optimizer"), stream)
    runner = trainer(ZeroStrategy(config=asked), max_steps=3)
    runner.fit(Configured("optimizer"), stream)
    assert runner.strategy.resolved.config["scheduler"]["params"]["total_num_steps"] == 3


class _Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Rows(8))


@ranks(2)
def test_every_fit_resolves_afresh() -> None:
    """R1: a second fit under other flags has another config and another engine; the user's mapping is not edited."""
    config = {"zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}, "gradient_clipping": "auto"}
    before = json.dumps(config)
    runner = fit(ZeroStrategy(config=config), Configured("optimizer"))
    first, engine = runner.strategy.resolved.config, runner.strategy.model
    assert (first["gradient_accumulation_steps"], first["gradient_clipping"]) == (3, 0.5)

    runner.accumulate_grad_batches, runner.gradient_clip_val = 2, None
    runner.fit_loop.epoch_progress.reset()
    runner.fit(Configured("optimizer"), loader(batch_size=4))
    second = runner.strategy.resolved.config
    assert (second["gradient_accumulation_steps"], second["gradient_clipping"]) == (2, 0.0)
    assert second["train_micro_batch_size_per_gpu"] == 4
    assert runner.strategy.model is not engine
    assert runner.strategy.model.gradient_accumulation_steps() == 2
    assert not list(find_auto(first)) and not list(find_auto(second))
    assert json.dumps(config) == before


@ranks(2)
def test_an_evaluation_asks_nothing_of_training() -> None:
    """C1: validate, test and predict raise no contradiction that concerns training, and keep no section for it."""
    config = {**WRONG, "zero_optimization": {"stage": 3}, "scheduler": {"type": "WarmupLR", "params": {}}}
    runner = trainer(ZeroStrategy(config=config), accumulate_grad_batches=3, gradient_clip_val=0.5)
    module = Configured(lr=0.01)
    for evaluate in (runner.validate, runner.test, runner.predict):
        evaluate(module, loader())
        assert not {"optimizer", "scheduler", "train_batch_size"} & runner.strategy.resolved.config.keys()


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.tables: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "DeepSpeed config" in record.getMessage():
            self.tables.append(record)


@ranks(2)
def test_the_resolved_config_is_told_and_written() -> None:
    """A fit logs its config with origins once, on rank 0, and writes it beside its logs, ready to be given again."""
    told = _Records()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(told)
    config = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}}
    runner = trainer(ZeroStrategy(preset="zero2", config=config), epochs=1, logger=CSVLogger("logs"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is not empty")  # what CSVLogger says of a file before its own
        runner.fit(Configured(lr=0.01), loader())
    runner.test(runner.lightning_module, loader(), verbose=False)
    if runner.global_rank == 0:
        [table] = told.tables
        assert table.levelno == logging.INFO
        assert "module.hparams.lr" in table.getMessage()
    else:
        assert told.tables == []

    written = Path(runner.log_dir, "deepspeed_config.json")
    assert json.loads(written.read_text()) == runner.strategy.resolved.config
    assert not list(written.parent.glob(".*"))
    again = trainer(ZeroStrategy(config=written), epochs=1)
    again.fit(Configured(lr=0.01), loader())
    assert again.strategy.resolved.config == runner.strategy.resolved.config


@ranks(2)
def test_nothing_is_written_without_logs() -> None:
    """Neither a fit without a logger, nor a fast_dev_run, nor an evaluation leaves a file behind."""
    trainer("zero1", epochs=1).fit(Regression(), loader())
    trainer("zero1", fast_dev_run=True, logger=CSVLogger("logs")).fit(Regression(), loader())
    trainer("zero1", logger=CSVLogger("logs")).validate(Regression(), loader(), verbose=False)
    assert not list(Path.cwd().rglob("*.json"))
