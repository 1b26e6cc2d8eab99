"""Results appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_zero.errors import CheckpointError
from lightning_zero.export.atomic import staged_file, staged_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_folder_appears_at_the_end(tmp_path: Path) -> None:
    """While it is being filled there is only a hidden folder, whose name does not contain the final one."""
    with staged_folder(tmp_path / "step=10") as hidden:
        (hidden / "a").write_text("1")
        assert names(tmp_path) == [hidden.name]
        assert hidden.name.startswith(".saving-")
        assert "step=10" not in hidden.name
    assert names(tmp_path) == ["step=10"]
    assert names(tmp_path / "step=10") == ["a"]


def test_an_old_result_is_replaced_file_by_file(tmp_path: Path) -> None:
    """What an older export left is removed, what belongs to others stays."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "notes.txt", "config.json"):
        (folder / name).write_text("old")
    with staged_folder(folder, ("model-*-of-*.safetensors",)) as hidden:
        (hidden / "model.safetensors").write_text("new")
        (hidden / "config.json").write_text("new")
    assert names(folder) == ["config.json", "model.safetensors", "notes.txt"]
    assert (folder / "config.json").read_text() == "new"
    assert (folder / "notes.txt").read_text() == "old"
    assert names(tmp_path) == ["model"]


def write_half(path: Path, error: BaseException) -> None:
    path.write_text("half")
    raise error


@pytest.mark.parametrize("old", [True, False])
def test_a_failure_leaves_what_was_there(tmp_path: Path, old: bool) -> None:
    """An error, or an interrupt, while writing leaves the old result and nothing else."""
    if old:
        (tmp_path / "w.ckpt").write_text("old")
    with pytest.raises(KeyboardInterrupt), staged_file(tmp_path / "w.ckpt") as hidden:
        write_half(hidden, KeyboardInterrupt())
    with pytest.raises(OSError, match="full"), staged_folder(tmp_path / "folder") as hidden:
        write_half(hidden / "a", OSError("full"))
    assert names(tmp_path) == (["w.ckpt"] if old else [])
    assert not old or (tmp_path / "w.ckpt").read_text() == "old"


def test_a_folder_is_not_taken_for_a_file(tmp_path: Path) -> None:
    """A format's kind of output is compared with what is there, and the error says what to give."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with (
        pytest.raises(CheckpointError, match="is a folder, and this format is one file"),
        staged_file(tmp_path / "folder"),
    ):
        pass
    with (
        pytest.raises(CheckpointError, match="is a file, and this format is a folder"),
        staged_folder(tmp_path / "file"),
    ):
        pass
