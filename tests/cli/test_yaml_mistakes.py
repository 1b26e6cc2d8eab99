"""Mistakes in a YAML and on the command line: one message that names the place, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.lm import ByteLlama
from lightning_zero import ConfigError, ZeroCLI
from lightning_zero.cli.main import main

RUN = """
seed_everything: false
model: examples.lm.ByteLlama
data: examples.lm.PythonTopics
trainer:
  accelerator: cpu
  devices: 2
  logger: false
"""
STRATEGY = "trainer.strategy.init_args"


def zero(init_args: str) -> str:
    return f"{RUN}  strategy: {{class_path: lightning_zero.ZeroStrategy, init_args: {init_args}}}"


MISTAKES = {
    "a list": (
        f"{RUN}  strategy: [{{class_path: lightning_zero.ZeroStrategy}}]",
        "trainer.strategy: is the list [{'class_path': 'lightning_zero.ZeroStrategy'}]. Write a name such as zero2",
    ),
    "misspelt init_arg": (zero("{stge: 3}"), f"{STRATEGY}.stge: lightning_zero.ZeroStrategy has no argument stge. "),
    "misspelt init_arg, the remedy": (zero("{stge: 3}"), "Write stage."),
    "a word for a number": (zero("{micro_batch_size: eight}"), f"{STRATEGY}.micro_batch_size: is eight. Write a whole"),
    "5e8 for a whole number": (f"{RUN}  max_steps: 5e8", "trainer.max_steps: is 500000000.0. Write a whole number"),
    "5e8, the remedy": (zero("{micro_batch_size: 5e8}"), "Write a whole number such as 500000000 or null."),
    "a stage that there is not": (zero("{stage: 5}"), f"{STRATEGY}.stage: is 5. Write 0, 1, 2, 3 or null."),
    "misspelt name": (
        f"{RUN}  strategy: zero3_ofload",
        "trainer.strategy: there is none named zero3_ofload. Write zero3",
    ),
    "misspelt class": (
        f"{RUN}  strategy: {{class_path: lightning_zero.ZeroStrategi}}",
        "trainer.strategy.class_path: lightning_zero.ZeroStrategi cannot be used: module 'lightning_zero' has no",
    ),
    "misspelt flag": (
        f"{RUN}  max_step: 3",
        "trainer.max_step: the Trainer has no argument max_step. Write max_steps.",
    ),
    "misspelt section": (f"{RUN}\nmodl: 3", "modl: the command has no argument modl."),
    "no model": ("trainer: {max_steps: 1}", "model: is missing"),
    "a model that there is not": ("model: nothing.Here", "model.class_path: nothing.Here cannot be used: No module"),
    "a word in the model": (
        f"{RUN}".replace("examples.lm.ByteLlama", "{class_path: examples.lm.ByteLlama, init_args: {hidden_size: big}}"),
        "model.init_args.hidden_size: is big. Write a whole number.",
    ),
    "misspelt callback's argument": (
        f"{RUN}  callbacks: [{{class_path: lightning_zero.BestModelCheckpoint, init_args: {{montor: x}}}}]",
        "trainer.callbacks.init_args.montor: lightning_zero.BestModelCheckpoint has no argument montor. Write monitor.",
    ),
    "a callback's own refusal": (
        f"{RUN}  callbacks: [{{class_path: lightning_zero.BestModelCheckpoint}}]",
        "trainer.callbacks: BestModelCheckpoint cannot tell which checkpoint is the best without a metric.",
    ),
    "misspelt DeepSpeed key": (zero("{config: {zero_optimisation: {stage: 3}}}"), f"{STRATEGY}: zero_optimisation"),
    "a list for the config": (zero("{config: [stage, 3]}"), f"{STRATEGY}: config: is the text"),
    "a file that there is not": (zero("{config: nothing.json}"), f"{STRATEGY}: config"),
    "two stages": (
        zero("{stage: 3, config: {zero_optimization: {stage: 2}}}"),
        f"{STRATEGY}: zero_optimization.stage: config says 2, argument stage=3 says 3.",
    ),
    "a Lightning refusal": (f"{RUN}  val_check_interval: 2.5", "trainer: "),
    "a Lightning refusal's text": (f"{RUN}  val_check_interval: 2.5", "invalid value 2.5 for val_check_interval"),
    "a word for devices": (f"{RUN}  accelerator: cpu\n  devices: two", "trainer: `devices` selected with"),
    "a checkpoint that there is not": (f"{RUN}\nckpt_path: nowhere.ckpt", "nowhere.ckpt does not exist"),
    "a checkpoint, its place": (f"{RUN}\nckpt_path: nowhere.ckpt", "lightning-zero fit: ckpt_path: "),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_names_its_place(
    mistake: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """K12: one message that begins with the place in the YAML, exit code 2, and no word of usage or traceback."""
    yaml, expected = MISTAKES[mistake]
    Path("run.yaml").write_text(yaml)
    assert main(["fit", "--config", "run.yaml"]) == 2
    error = capsys.readouterr().err
    message = error[error.index("lightning-zero fit: ") :]  # after what Lightning logs about the machine
    assert expected in message
    assert message.count("lightning-zero fit: ") == 1
    assert "usage:" not in error
    assert "Traceback" not in error
    assert len(message) < 500


def test_debug_shows_the_traceback() -> None:
    """`--debug` lets an error through, with what jsonargparse has said in full."""
    Path("run.yaml").write_text(zero("{stge: 3}"))
    with pytest.raises(ConfigError, match="has no argument stge") as caught:
        main(["fit", "--config", "run.yaml", "--debug"])
    assert "Does not validate against any of the Union subtypes" in str(caught.value.__cause__)


def test_on_the_command_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    """A value on the command line is named as in the YAML, and so is a file that is not there."""
    Path("run.yaml").write_text(RUN)
    assert main(["fit", "--config", "run.yaml", "--trainer.max_epochs", "ten"]) == 2
    assert "lightning-zero fit: trainer.max_epochs: is ten. Write a whole number" in capsys.readouterr().err
    assert main(["fit", "--config", "run.yaml", "--trainer.strategy", "[zero2, zero3]"]) == 2
    assert "trainer.strategy: there is none named [zero2, zero3]. It is a list" in capsys.readouterr().err
    assert main(["fit", "--config", "nothing.yaml"]) == 2
    assert "nothing.yaml" in capsys.readouterr().err


def test_as_a_program_of_ones_own(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with `ZeroCLI` ends in the same way; called with `args`, the class raises."""
    Path("run.yaml").write_text(zero("{stge: 3}"))
    words = ["fit", "--config", "run.yaml"]
    with pytest.raises(ConfigError, match=r"trainer\.strategy\.init_args\.stge: "):
        ZeroCLI(args=words)
    monkeypatch.setattr("sys.argv", ["/some/program.py", *words])
    with pytest.raises(SystemExit) as ended:
        ZeroCLI()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("program.py: trainer.strategy.init_args.stge: ")
    with pytest.raises(ConfigError, match=r"model\.hiden_size: there is no such argument\. Write hidden_size\."):
        ZeroCLI(ByteLlama, args=["fit", "--model.hiden_size", "8"])
