"""README and docs: their Python runs, page by page, on two ranks; their commands do; their screens are not stale."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from tests.harness import ranks
from tests.models import Regression, Rows
from tests.screens import CHECKPOINT, ROOT, output_of, printed, screens
from tests.test_docs import BLOCKS, PAGES, Block

SCREENS = [screen for page in PAGES for screen in screens(page)]


@pytest.mark.parametrize("screen", [s for s in SCREENS if not s.is_python], ids=str)
def test_screens_are_what_the_code_prints(screen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A screen in the docs is what its command prints now; `python -m tests.screens` writes them again."""
    monkeypatch.setenv("COLUMNS", "80")  # the screens have a width of their own
    assert printed(screen) == screen.shown


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.runs], ids=str)
def test_programs_run(block: Block, tmp_path: Path) -> None:
    """A block that is marked as a program runs as it stands, and prints what the page shows below it."""
    output = output_of(block.text, tmp_path)
    shown = [screen.shown for screen in SCREENS if screen.is_python and screen.command == f"{block.text}\n"]
    assert shown in ([], [output])


# What the pages leave to the reader: a model, data, files. Each scene is set in an empty folder, by every rank.


class Reader(Regression):
    """A model of a reader's own, with a learning rate."""

    def __init__(self) -> None:
        super().__init__("sgd", scheduler=False)
        self.lr = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.should_stop = True  # pages do not say how long to train
        return super().training_step(batch, batch_idx)


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, **sizes))


def block_of(page: str, language: str, begin: str = "") -> str:
    """The first block of a page in a language that begins with some words."""
    path = ROOT / page
    return next(b.text for b in BLOCKS if b.page == path and b.language == language and b.text.startswith(begin))


def readme() -> dict[str, Any]:
    Path("ds.json").write_text(block_of("README.md", "json"))
    return fabric()


def fabric() -> dict[str, Any]:
    return {"MyModel": lambda: torch.nn.Linear(7, 3), "loader": DataLoader(Rows(32).inputs, batch_size=2)}


def launching() -> dict[str, Any]:
    return {"model": Reader(), "data": DataLoader(Rows(8), batch_size=2)}


ROWS = [{"input_ids": row, "labels": row} for row in torch.arange(16 * 8).view(16, 8) % 32]


def migrating() -> dict[str, Any]:
    from lightning import Trainer
    from lightning.pytorch.strategies import DeepSpeedStrategy

    if os.environ["RANK"] == "0":
        tiny_llama().save_pretrained("model")
        Path("ds.json").write_text(block_of("docs/migrating.md", "json"))
    torch.distributed.barrier()
    return {"rows": ROWS, "Trainer": Trainer, "DeepSpeedStrategy": DeepSpeedStrategy}


class Tuned(L.LightningModule):
    """Trains the transformers model that a page's class builds."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Llama(Tuned):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        self.net = self.net or tiny_llama()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(**batch).loss


def transformers() -> dict[str, Any]:
    from peft import LoraConfig, PeftModel, get_peft_model

    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    if os.environ["RANK"] == "0":
        for name in ("model", "teacher"):
            tiny_llama().save_pretrained(name)
        get_peft_model(tiny_llama(), config).save_pretrained("adapter")
    torch.distributed.barrier()
    run = {"trainer": brief("zero3"), "model": Llama(), "data": DataLoader(ROWS, batch_size=2)}
    peft = {"LoraConfig": LoraConfig, "PeftModel": PeftModel, "get_peft_model": get_peft_model}
    return {**run, **peft, "torch": torch, "prompt": torch.tensor([[1, 2, 3]])}


SCENES: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": readme,
    "docs/fabric.md": fabric,
    "docs/launching.md": launching,
    "docs/migrating.md": migrating,
    "docs/transformers.md": transformers,
}


# What a reader does with the classes and functions of a page.


def zero(words: dict[str, Any]) -> None:
    class Model(words["Watched"], Reader):  # type: ignore[name-defined, misc]
        pass

    runner = brief("zero3")
    model = Model()
    runner.fit(model, DataLoader(Rows(4), batch_size=2))
    assert runner.callback_metrics["first_gradient_norm"] > 0
    assert words["norm_of_the_first_weight"](model) > 1e-3
    classifier = words["Classifier"]()
    classifier.configure_model()
    assert classifier.net(torch.zeros(1, 784)).shape == (1, 10)


def checkpoints(words: dict[str, Any]) -> None:
    class Model(words["FineTuned"], Reader):  # type: ignore[name-defined, misc]
        pass

    data = DataLoader(Rows(4), batch_size=2)
    first = brief("zero2")
    first.fit(Reader(), data)
    first.save_checkpoint("pretrained.ckpt", weights_only=True)
    brief("zero3").fit(Model(), data)


def tune(words: dict[str, Any]) -> None:
    assert words["tokens"].shape == (1, 23)
    for name in ("Distilled", "Adapted"):
        model = type(name, (words[name], Tuned), {})()
        brief("zero3").fit(model, words["data"])
        if name == "Distilled":
            assert next(model.teacher[0].parameters()).numel() == 32 * 16


def brief(strategy: str) -> Any:
    from tests.models import trainer

    return trainer(strategy, max_steps=1)


AFTERWARDS: dict[str, Callable[[dict[str, Any]], None]] = {
    "docs/zero.md": zero,
    "docs/checkpoints.md": checkpoints,
    "docs/transformers.md": tune,
}


def python_of(page: Path) -> list[Block]:
    return [b for b in BLOCKS if b.page == page and b.language == "python" and not b.runs and b.only_compiled is None]


@ranks(2, timeout=400)
def test_pages_run(tmp_path: Path) -> None:
    """Every other Python block runs, after those above it on the page, with what the page leaves to the reader."""
    import deepspeed

    brief("zero1").fit(Reader(), DataLoader(Rows(4), batch_size=2))  # for pages that begin in the middle of a run
    assert deepspeed.comm.is_initialized()
    rank = os.environ["RANK"]
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        folder = tmp_path / page.stem
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        words: dict[str, Any] = {"__name__": f"page_{page.stem}", **SCENES.get(name, dict)()}
        for block in python_of(page):
            try:
                exec(compile(block.text, str(block), "exec"), words)
            except Exception:
                pytest.fail(f"rank {rank}, {block}: {traceback.format_exc()}")
        if name in AFTERWARDS:
            AFTERWARDS[name](words)


PROJECT = """
import lightning as L
from tests.models import Regression, loader


class MyModel(Regression):
    pass


class MyData(L.LightningDataModule):
    def train_dataloader(self):
        return loader()
"""


def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every `lightning-zero` line in a console block runs, with the page's YAML; `fit` as far as `resolve` goes."""
    from lightning_zero.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("my_project.py").write_text(PROJECT)
    for name, target in (("configs", ROOT / "configs"), ("last.ckpt", CHECKPOINT)):
        Path(name).symlink_to(target)
    Path("fit.yaml").write_text(block_of("README.md", "yaml", "# fit.yaml"))
    lines = [line for b in BLOCKS if b.language == "console" for line in b.text.splitlines()]
    commands = [line.partition("#")[0].split()[1:] for line in lines if re.match(r"lightning-zero \w+ ", line)]
    assert len(commands) > 8
    for words in commands:
        if words[0] in ("fit", "validate", "test", "predict", "resolve"):
            words = ["resolve", *words[1:], "--trainer.accelerator", "cpu", "--trainer.logger", "false"]
            if "--ckpt_path" in words:  # the file need not be there
                assert words[words.index("--ckpt_path") + 1].endswith(".ckpt")
        if words[0] == "consolidate" and "--format" not in words:
            words = [*words, "--format", "safetensors"]  # this checkpoint is of no transformers model
        assert main(words) == 0, f"{words}: {capsys.readouterr().err}"
