"""Config files: what is read, and how a broken one is described."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_zero.config.readers import read_file
from lightning_zero.errors import ConfigError, ConfigNotFoundError


def write(folder: Path, name: str, text: str) -> Path:
    """A file with a text."""
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_json_with_comments(tmp_path: Path) -> None:
    """Proves that a JSON with comments and trailing commas is read, as DeepSpeed reads it."""
    text = '{\n  # batch\n  "train_batch_size": 2e1, // all\n  /* half */ "fp16": {"enabled": "auto",},\n}\n'
    assert read_file(write(tmp_path, "a.json", text)) == {"train_batch_size": 20.0, "fp16": {"enabled": "auto"}}


def test_strict_json_keeps_its_strings(tmp_path: Path) -> None:
    """Proves that a comment sign inside a string is no comment."""
    text = '{"wandb": {"project": "a # b // c"}}'
    assert read_file(write(tmp_path, "a.json", text)) == {"wandb": {"project": "a # b // c"}}


@pytest.mark.parametrize("name", ["a.yaml", "a.yml", "A.YAML"])
def test_yaml(tmp_path: Path, name: str) -> None:
    """Proves that a YAML file is read by its ending, anchors and merges too."""
    text = "base: &b {device: cpu}\nzero_optimization:\n  stage: 3\n  offload_param: {<<: *b, pin_memory: true}\n"
    section = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}
    assert read_file(write(tmp_path, name, text))["zero_optimization"] == section


def test_a_path_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves that ~ is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, "a.json", "{}")
    assert read_file("~/a.json") == {}


def test_a_missing_file(tmp_path: Path) -> None:
    """Proves that a missing file is a FileNotFoundError that names path and working folder."""
    with pytest.raises(ConfigNotFoundError, match=rf"nope\.json: is not there, seen from {tmp_path}") as caught:
        read_file("nope.json")
    assert isinstance(caught.value, (FileNotFoundError, ConfigError))


def test_a_folder(tmp_path: Path) -> None:
    """Proves that a folder is told from a file."""
    with pytest.raises(ConfigError, match=r"is a folder. Pass the JSON or YAML file inside it"):
        read_file(tmp_path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    """Proves that a file that is no UTF-8 text is named."""
    file = tmp_path / "a.json"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"a\.json: cannot be read"):
        read_file(file)


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("a.json", '{\n  "a": 1 "b": 2\n}', "line 2, column 8"),
        ("a.json", '{\n  # all\n  "a": 1 "b": 2\n}', "line 3, column 8"),
        ("a.json", '{\n  "a": [1, 2\n', "line 3, column 1"),
        ("a.json", '{\n  // all\n  "a": {"b": 1\n', "line 4, column 1"),
        ("a.json", '{"a": 1,,}', "line 1, column 9"),
        ("a.yaml", "a: [1\nb: 2\n", "line 2, column 2"),
        ("a.yaml", "a: 1\n\tb: 2\n", "line 2, column 1"),
    ],
)
def test_a_broken_file(tmp_path: Path, name: str, text: str, place: str) -> None:
    """Proves that a broken file is described by line and column, a comma forgotten on a line too."""
    with pytest.raises(ConfigError, match=rf"{name}, {place}: .*Correct the file there"):
        read_file(write(tmp_path, name, text))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"a": {"twice": 1, "twice": 2}}'),
        ("a.json", '{"a": {"twice": 1, "twice": 2}} // comment'),
        ("a.yaml", "a:\n  twice: 1\n  twice: 1\n"),
    ],
)
def test_a_repeated_key(tmp_path: Path, name: str, text: str) -> None:
    """Proves that a key that stands twice in a section is an error with its name."""
    with pytest.raises(ConfigError, match='key "twice" stands twice'):
        read_file(write(tmp_path, name, text))


def test_the_same_key_in_two_sections(tmp_path: Path) -> None:
    """Proves that only one section counts for repetition."""
    assert read_file(write(tmp_path, "a.json", '{"a": {"x": 1}, "b": {"x": 2}}')) == {"a": {"x": 1}, "b": {"x": 2}}


@pytest.mark.parametrize(
    ("name", "text", "kind"), [("a.json", "[1]", "list"), ("a.yaml", "- 1\n", "list"), ("a.yaml", "hi", "str")]
)
def test_something_else_than_a_mapping(tmp_path: Path, name: str, text: str, kind: str) -> None:
    """Proves that a file must hold a mapping."""
    with pytest.raises(ConfigError, match=f"holds a {kind} where a mapping belongs"):
        read_file(write(tmp_path, name, text))


def test_a_key_that_is_no_string(tmp_path: Path) -> None:
    """Proves that a YAML number as a key is named and refused."""
    with pytest.raises(ConfigError, match=r"3: is a key in config file a.yaml and not a string"):
        read_file(write(tmp_path, "a.yaml", "zero_optimization: {3: true}\n"))
