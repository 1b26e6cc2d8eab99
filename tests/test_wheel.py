"""What a user installs: the built wheel, away from the source tree."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.harness.forkserver import REPOSITORY
from tests.test_public_names import STRATEGIES

_REPORT = """
import json
import lightning_zero
from lightning.pytorch.strategies import StrategyRegistry
strategies = [StrategyRegistry.get(name) for name in sorted(StrategyRegistry) if name.startswith("zero")]
print(json.dumps({"file": lightning_zero.__file__, "built": [type(s).__module__ for s in strategies]}))
"""


def pip(*arguments: str) -> None:
    """Runs pip without asking an index for anything."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, "--no-deps", "--no-index"]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the working tree."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", str(REPOSITORY), "--no-build-isolation", "--wheel-dir", str(folder))
    (built,) = folder.glob("lightning_zero-*.whl")
    return built


def test_the_wheel_holds_presets_types_and_licence(wheel: Path) -> None:
    """The presets that the names stand for and the marker of typed packages are in; tests and tools are not."""
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        for name in STRATEGIES:
            packaged = archive.read(f"lightning_zero/config/presets/{name}.json")
            assert packaged == (REPOSITORY / f"configs/deepspeed/{name}.json").read_bytes()
    assert "lightning_zero/py.typed" in files
    assert any(name.endswith("LICENSE") for name in files)
    assert {name.partition("/")[0].partition("-")[0] for name in files} == {"lightning_zero"}


def test_the_installed_wheel_registers_the_names(wheel: Path, tmp_path: Path) -> None:
    """Installed alone, the package is imported from there and builds all seven strategies from its own presets."""
    site = tmp_path / "site"
    pip("install", str(wheel), "--target", str(site))
    environment = {**os.environ, "PYTHONPATH": str(site), "LIGHTNING_ZERO_NVME_PATH": str(tmp_path)}
    command = [sys.executable, "-c", _REPORT]
    result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=environment)
    report = json.loads(result.stdout.splitlines()[-1])
    assert Path(report["file"]).is_relative_to(site)
    assert report["built"] == ["lightning_zero.strategies.trainer"] * len(STRATEGIES)
