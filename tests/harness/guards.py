"""Fixtures that keep one test from changing the next: environment, process group, working directory, stray files."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.forkserver import REPOSITORY

_PYTEST_OWN = {"PYTEST_CURRENT_TEST"}  # pytest itself changes it during a test
_LEFT_BY_TRAINING = ("lightning_logs", "checkpoints", "*.ckpt", "*.pt", "*.safetensors")


@pytest.fixture(autouse=True)
def _environment_is_left_alone() -> Iterator[None]:
    """Restores `os.environ`, and fails the test that changed it (monkeypatch undoes its own changes earlier)."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = sorted(k for k in before.keys() | after.keys() if k not in _PYTEST_OWN and before.get(k) != after.get(k))
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    if changed:
        pytest.fail(f"the test left os.environ changed: {', '.join(changed)}", pytrace=False)


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """Destroys a process group that a test left in this process, and fails that test."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test left a process group behind", pytrace=False)


@pytest.fixture(autouse=True)
def _working_directory_is_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs every test, and so every rank, in its own empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True, scope="session")
def _repository_stays_clean() -> Iterator[None]:
    """Fails the session when training output appeared in the repository."""

    def found() -> set[Path]:
        return {path for pattern in _LEFT_BY_TRAINING for path in REPOSITORY.glob(pattern)}

    before = found()
    yield
    stray = sorted(str(path) for path in found() - before)
    if stray:
        pytest.fail(f"the tests left files in the repository: {', '.join(stray)}", pytrace=False)
