"""Every path that a user may give finds its checkpoint, or is answered with the right one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_zero.checkpoint.layout import locate, parse_shard_name, tags
from lightning_zero.errors import CheckpointError, CheckpointNotFoundError
from lightning_zero.export.atomic import TEMPORARY_PREFIX


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run's folder: one sharded checkpoint with two tags, one Lightning file."""
    checkpoint = tmp_path / "run" / "epoch=1-step=8.ckpt"
    for tag in ("global_step5", "global_step9"):
        (checkpoint / tag).mkdir(parents=True)
        (checkpoint / tag / "mp_rank_00_model_states.pt").touch()
        (checkpoint / tag / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    (checkpoint / "latest").write_text("global_step9\n")
    (tmp_path / "run" / "whole.ckpt").touch()
    return checkpoint


def test_folder_gives_the_latest_tag(root: Path) -> None:
    """C4: the checkpoint's folder stands for the tag that `latest` names."""
    found = locate(root)
    assert (found.kind, found.root, found.tag) == ("sharded", root, "global_step9")


def test_a_tag_can_be_chosen(root: Path) -> None:
    """C2: another tag of the same folder can be asked for."""
    assert locate(root, "global_step5").folder == root / "global_step5"


@pytest.mark.parametrize("inner", ["global_step5", "global_step5/mp_rank_00_model_states.pt"])
def test_inner_paths_give_their_own_tag(root: Path, inner: str) -> None:
    """C4: a tag folder, or a shard in it, stands for that tag, whatever `latest` says."""
    assert locate(root / inner) == locate(root, "global_step5")


def test_latest_itself_stands_for_its_folder(root: Path) -> None:
    """C4: the file `latest` is taken for the checkpoint it belongs to."""
    assert locate(root / "latest") == locate(root)


def test_without_latest_the_only_tag_is_taken(root: Path) -> None:
    """C4: `save_latest=False` leaves no file `latest`; one tag needs none, two need a choice."""
    (root / "latest").unlink()
    with pytest.raises(CheckpointError, match=r"several tags. Pass tag=, one of: global_step5, global_step9"):
        locate(root)
    (root / "global_step5" / "mp_rank_00_model_states.pt").unlink()
    (root / "global_step5" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    assert locate(root).tag == "global_step9"


def test_latest_that_names_an_absent_tag(root: Path) -> None:
    """C11: `latest` naming a tag that is not there is said, with the tags that are."""
    (root / "latest").write_text("global_step7")
    with pytest.raises(
        CheckpointError, match=r"latest names the tag 'global_step7', .* one of: global_step5, global_step9"
    ):
        locate(root)


def test_an_absent_tag(root: Path) -> None:
    """C2: a tag that is not there is answered with those that are."""
    with pytest.raises(CheckpointNotFoundError, match=r"no tag 'global_step6' .* one of: global_step5, global_step9"):
        locate(root, "global_step6")


def test_a_missing_path_names_what_is_near(root: Path) -> None:
    """C4: a misspelt path is answered with its neighbours, and is a FileNotFoundError."""
    with pytest.raises(FileNotFoundError, match=r"epoch=1-step=9.ckpt does not exist. Near it: .*epoch=1-step=8.ckpt"):
        locate(root.with_name("epoch=1-step=9.ckpt"))


def test_a_folder_of_checkpoints_lists_them(root: Path) -> None:
    """C4: the folder that holds checkpoints is answered with their names."""
    with pytest.raises(CheckpointError, match=r"holds 2. Give one of them: epoch=1-step=8.ckpt, whole.ckpt"):
        locate(root.parent)


def test_an_empty_folder(tmp_path: Path) -> None:
    """C4: a folder without weights is no checkpoint."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="neither shards"):
        locate(tmp_path / "empty")


@pytest.mark.parametrize("url", ["s3://bucket/last.ckpt", "gs://bucket/run", "hdfs://host/x", "https://host/x.ckpt"])
def test_remote_urls_are_refused(url: str) -> None:
    """C18: a URL is refused as such, not looked for as a local path."""
    with pytest.raises(CheckpointError, match=rf"{url} is a remote URL"):
        locate(url)


def test_an_unfinished_save_is_no_checkpoint(root: Path) -> None:
    """C16: the hidden folder of a killed save is neither found among tags nor accepted as a path."""
    unfinished = root / f"{TEMPORARY_PREFIX}1f"
    (root / "global_step9").rename(unfinished)
    assert tags(root) == ["global_step5"]
    with pytest.raises(CheckpointError, match="did not finish"):
        locate(unfinished)
    with pytest.raises(CheckpointError, match="did not finish"):
        locate(unfinished / "mp_rank_00_model_states.pt")


def test_single_files_and_safetensors(root: Path, tmp_path: Path) -> None:
    """C4: a consolidated file, a safetensors file and a transformers folder are told apart; they have no tags."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "model" / "config.json").touch()
    assert locate(root.parent / "whole.ckpt").kind == "torch"
    assert locate(tmp_path / "model").kind == locate(tmp_path / "model" / "model.safetensors").kind == "safetensors"
    assert locate(tmp_path / "model").transformers_files == tmp_path / "model"
    for path in (root.parent / "whole.ckpt", tmp_path / "model"):
        with pytest.raises(CheckpointError, match="has no tags"):
            locate(path, "global_step5")


def test_a_link_is_followed(root: Path) -> None:
    """C20: `last.ckpt` as a link to a checkpoint folder is that checkpoint."""
    link = root.with_name("last.ckpt")
    link.symlink_to(root.name)
    assert locate(link).tag == "global_step9"


def test_a_universal_checkpoint_is_explained(tmp_path: Path) -> None:
    """A folder of DeepSpeed's universal converter is answered with what to give instead."""
    (tmp_path / "universal" / "zero").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="universal checkpoint"):
        locate(tmp_path / "universal")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mp_rank_00_model_states.pt", ("model", None, 0, False)),
        ("zero_pp_rank_12_mp_rank_00_model_states.pt", ("model", 12, 0, False)),
        ("bf16_zero_pp_rank_3_mp_rank_01_optim_states.pt", ("optim", 3, 1, True)),
        ("zero_pp_rank_3_mp_rank_00_optim_states.pt.part", None),
        ("optim_states.pt", None),
    ],
)
def test_shard_names(name: str, expected: tuple[str, int | None, int, bool] | None) -> None:
    """DeepSpeed's file names are read as `DeepSpeedEngine._get_ckpt_name` and `_get_rank_zero_ckpt_name` write them."""
    shard = parse_shard_name(name)
    assert (shard and (shard.role, shard.rank, shard.model_parallel_rank, shard.bf16)) == expected
