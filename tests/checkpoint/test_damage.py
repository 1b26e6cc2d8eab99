"""Damaged checkpoints: every file that is wrong is named, before anything is read from the others."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.checkpoint.consolidate import consolidate, load_full_state_dict
from lightning_zero.checkpoint.verify import inspect_checkpoint, verify_checkpoint
from lightning_zero.errors import CheckpointError, CheckpointNotFoundError

FIXTURES = Path(__file__).parents[1] / "data" / "checkpoints"
STAGE2 = FIXTURES / "deepspeed-stage2-bf16"
STAGE3 = FIXTURES / "deepspeed-stage3-bf16"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def resave(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what a shard says, as DeepSpeed's own reader and writer would."""
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def of_three_ranks(path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        state = content.get("optimizer_state_dict")
        if state is None:
            content["dp_world_size"] = 3
        else:
            state["partition_count"] = 3 if isinstance(state["partition_count"], int) else [3, 3]

    resave(path, change)


def stray_of_an_older_world(folder: Path) -> None:
    shutil.copy(folder / OPTIM.format(1), folder / OPTIM.format(2))
    of_three_ranks(folder / OPTIM.format(2))


def of_another_step(folder: Path) -> None:
    resave(folder / MODEL.format(1), lambda content: content.update(global_steps=7))


def of_another_optimizer_step(folder: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        for slot in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            slot["step"] += 4

    resave(folder / OPTIM.format(1), change)


TABLE: list[tuple[str, Path, Callable[[Path], Any], str]] = [
    ("missing optimizer shard", STAGE2, lambda f: (f / OPTIM.format(1)).unlink(), rf"{OPTIM.format(1)} is missing"),
    ("missing model shard", STAGE3, lambda f: (f / MODEL.format(1)).unlink(), rf"{MODEL.format(1)} is missing"),
    ("missing first model shard", STAGE3, lambda f: (f / MODEL.format(0)).unlink(), rf"{MODEL.format(0)} is missing"),
    (
        "missing model file",
        STAGE2,
        lambda f: (f / "mp_rank_00_model_states.pt").unlink(),
        "mp_rank_00_model_states.pt is missing",
    ),
    ("truncated shard", STAGE2, lambda f: truncate(f / OPTIM.format(0)), rf"{OPTIM.format(0)} is truncated"),
    ("empty shard", STAGE3, lambda f: (f / OPTIM.format(1)).write_bytes(b""), rf"{OPTIM.format(1)} is empty"),
    (
        "no shard at all",
        STAGE3,
        lambda f: (f / OPTIM.format(1)).write_bytes(b"x" * 99),
        rf"{OPTIM.format(1)} is not a file that torch",
    ),
    ("stray shard of an older world", STAGE2, stray_of_an_older_world, rf"{OPTIM.format(2)} is of a run of 3 ranks"),
    (
        "stray copy",
        STAGE3,
        lambda f: shutil.copy(f / OPTIM.format(1), f / OPTIM.format(4)),
        rf"{OPTIM.format(4)} is stray",
    ),
    ("two worlds", STAGE3, lambda f: of_three_ranks(f / OPTIM.format(1)), rf"{OPTIM.format(1)} is of a run of 3 ranks"),
    ("two saves", STAGE3, of_another_step, rf"{MODEL.format(1)} was saved at step 7, and {MODEL.format(0)} at step 3"),
    (
        "two saves of the optimizer",
        STAGE2,
        of_another_optimizer_step,
        rf"{OPTIM.format(1)} was saved at optimizer step 7",
    ),
    (
        "two precisions",
        STAGE2,
        lambda f: shutil.copy(f / OPTIM.format(0), f / OPTIM.format(0).removeprefix("bf16_")),
        "are of different runs",
    ),
    (
        "tensor parallel",
        STAGE2,
        lambda f: shutil.copy(f / "mp_rank_00_model_states.pt", f / "mp_rank_01_model_states.pt"),
        "mp_rank_01_model_states.pt belongs to a tensor-parallel run",
    ),
]


@pytest.mark.parametrize(("good", "damage", "message"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
@pytest.mark.parametrize("use", [inspect_checkpoint, verify_checkpoint, load_full_state_dict])
def test_damage_is_named(
    tmp_path: Path, use: Callable[[Path], object], good: Path, damage: Callable[[Path], Any], message: str
) -> None:
    """C11: whatever reads a damaged checkpoint refuses it and names the file and the fault."""
    shutil.copytree(good, tmp_path / "copy")
    damage(tmp_path / "copy" / "global_step3")
    with pytest.raises(CheckpointError, match=message):
        use(tmp_path / "copy")


def test_every_fault_is_named_at_once(tmp_path: Path) -> None:
    """C11: one error lists the truncated, the missing and the stray file."""
    shutil.copytree(STAGE3, tmp_path / "copy")
    folder = tmp_path / "copy" / "global_step3"
    truncate(folder / OPTIM.format(0))
    (folder / MODEL.format(1)).unlink()
    shutil.copy(folder / OPTIM.format(1), folder / OPTIM.format(5))
    with pytest.raises(CheckpointError) as caught:
        verify_checkpoint(tmp_path / "copy")
    for name in (OPTIM.format(0), MODEL.format(1), OPTIM.format(5)):
        assert name in str(caught.value)


def test_only_missing_files_are_a_file_not_found_error(tmp_path: Path) -> None:
    """A checkpoint that merely lacks files raises what a caller of a missing file would catch."""
    shutil.copytree(STAGE3, tmp_path / "copy")
    (tmp_path / "copy" / "global_step3" / OPTIM.format(1)).unlink()
    with pytest.raises(CheckpointNotFoundError):
        verify_checkpoint(tmp_path / "copy")


def test_a_flipped_byte_is_found_by_the_deep_check(tmp_path: Path) -> None:
    """C11: a tensor's byte that changed on disk passes the quick check and fails the deep one, which names the file."""
    shutil.copytree(STAGE2, tmp_path / "copy")
    path = tmp_path / "copy" / "global_step3" / OPTIM.format(1)
    with zipfile.ZipFile(path) as archive:
        record = max(archive.infolist(), key=lambda record: record.header_offset if "/data/" in record.filename else 0)
    data = bytearray(path.read_bytes())
    data[data.index(record.filename.encode()) + 200] ^= 0x40
    path.write_bytes(data)
    verify_checkpoint(tmp_path / "copy")
    with pytest.raises(CheckpointError, match=rf"{OPTIM.format(1)} is damaged: its checksum does not hold for data/"):
        verify_checkpoint(tmp_path / "copy", deep=True)


def test_a_weightless_stage_3_folder_is_explained(tmp_path: Path) -> None:
    """C3: at stage 3 the weights are in the optimizer's shards; without them the error says so."""
    shutil.copytree(STAGE3, tmp_path / "copy")
    for rank in (0, 1):
        (tmp_path / "copy" / "global_step3" / OPTIM.format(rank)).unlink()
    with pytest.raises(CheckpointError, match="holds no weights: at stage 3"):
        load_full_state_dict(tmp_path / "copy")


def test_without_optimizer_shards_stage_2_gives_its_16_bit_weights(tmp_path: Path) -> None:
    """W11: a weights-only folder gives the 16-bit weights as they are, and says that it has no masters."""
    shutil.copytree(STAGE2, tmp_path / "copy")
    for rank in (0, 1):
        (tmp_path / "copy" / "global_step3" / OPTIM.format(rank)).unlink()
    whole = load_full_state_dict(STAGE2)
    weights = load_full_state_dict(tmp_path / "copy")
    assert not inspect_checkpoint(tmp_path / "copy").has_masters
    parameters = [tensor.name for tensor in inspect_checkpoint(STAGE2).tensors if tensor.role != "buffer"]
    assert {weights[name].dtype for name in parameters} == {torch.bfloat16}
    for name, value in weights.items():
        assert torch.equal(value, whole[name].to(value.dtype)), name


class Bomb:
    """Pickles as a call that leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.trace),)


def test_a_pickle_bomb_does_not_go_off(tmp_path: Path) -> None:
    """A shard that calls a function when unpickled is read without calling it, and exported without it."""
    shutil.copytree(STAGE2, tmp_path / "copy")
    path = tmp_path / "copy" / "global_step3" / "mp_rank_00_model_states.pt"
    trace = tmp_path / "ran"
    resave(path, lambda content: content.update(hyper_parameters={"bomb": Bomb(trace), "width": 5}))
    verify_checkpoint(tmp_path / "copy", deep=True)
    with pytest.warns(UserWarning, match=r"hyper_parameters.bomb \(posix.mkdir\)"):
        consolidate(tmp_path / "copy", tmp_path / "whole.ckpt", format="lightning")
    assert torch.load(tmp_path / "whole.ckpt", weights_only=True)["hyper_parameters"] == {"width": 5}
    assert not trace.exists()
    torch.load(path, weights_only=False)  # the trap is live: an ordinary reader springs it
    assert trace.exists()


@pytest.mark.parametrize(
    "opcode", [b"c__builtin__\neval\n(S'1/0'\ntR.", b"cbuiltins\ngetattr\n(cos\nsystem\nS'x'\ntR."]
)
def test_hand_written_pickles_are_inert(tmp_path: Path, opcode: bytes) -> None:
    """Pickle opcodes that call builtins by hand give inert records."""
    path = tmp_path / "hand.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hand/data.pkl", opcode)
    with pytest.raises(CheckpointError, match="a state dict is needed"):
        load_full_state_dict(path)


def test_a_tensor_outside_its_record_is_refused(tmp_path: Path) -> None:
    """A pickle that claims more elements than its record holds cannot make a reader look beyond it."""
    torch.save({"a": torch.arange(4.0)}, tmp_path / "a.pt")
    altered = io.BytesIO()
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(altered, "w") as new:
        for record in old.infolist():
            data = old.read(record)
            if record.filename.endswith("data.pkl"):
                data = data.replace(pickle.BININT1 + b"\x04\x85", pickle.BININT1 + b"\x40\x85")
            new.writestr(record.filename, data)
    (tmp_path / "a.pt").write_bytes(altered.getvalue())
    with pytest.raises(CheckpointError, match="does not fit into its record"):
        load_full_state_dict(tmp_path / "a.pt")


def test_the_old_serialization_is_explained(tmp_path: Path) -> None:
    """A file without torch's zip serialization is answered with the DeepSpeed key that turns it on."""
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="checkpoint_serialization"):
        load_full_state_dict(tmp_path / "old.pt")
