"""What `import lightning_zero` gives, and what it costs."""

import __future__

import json
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

import lightning_zero

# Names that may be public; each arrives with the capability it stands for.
KNOWN = {
    *("ZeroStrategy", "FabricZeroStrategy"),
    *("BestModelCheckpoint", "GatheredWeightsCheckpoint", "ZeroMonitor"),
    *("resolve_config", "ResolvedConfig", "RunFacts"),
    *("consolidate", "inspect_checkpoint", "load_from_checkpoint", "load_full_state_dict", "verify_checkpoint"),
    *("estimate_memory", "ZeroCLI", "DeepSpeedEnvironment"),
    *("ZeroError", "ConfigError", "CheckpointError"),
}
STRATEGIES = ["zero1", "zero1_offload", "zero2", "zero2_offload", "zero3", "zero3_nvme", "zero3_offload"]


def test_all_is_sorted_and_known() -> None:
    """`__all__` is in order, without repetition, and holds only names of the design."""
    assert lightning_zero.__all__ == sorted(set(lightning_zero.__all__))
    assert set(lightning_zero.__all__) <= KNOWN


@pytest.mark.parametrize("name", lightning_zero.__all__)
def test_a_public_name_has_a_docstring(name: str) -> None:
    """Every public name is there and says what it is, in its own words."""
    public = getattr(lightning_zero, name)
    inherited = [base.__doc__ for base in getattr(public, "__mro__", ())[1:]]
    assert public.__doc__
    assert public.__doc__ not in inherited


def test_nothing_else_is_public() -> None:
    """What is not in `__all__` begins with an underscore or is a package of ours."""
    found = {name for name, value in vars(lightning_zero).items() if not name.startswith("_") and not _is_ours(value)}
    assert found | {"ZeroCLI"} == set(lightning_zero.__all__)  # which is imported when it is asked for


def _is_ours(value: object) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__.startswith("lightning_zero.")
    return value is __future__.annotations  # a module attribute by the way of `from __future__ import annotations`


_REPORT = """
import json, sys
import lightning.pytorch
before = set(sys.modules)
import lightning_zero
added = {name.partition(".")[0] for name in set(sys.modules) - before}
from lightning.pytorch.strategies import StrategyRegistry
ours = [name for name in StrategyRegistry if name.startswith("zero")]
presets = {name: StrategyRegistry[name]["init_params"].get("preset") for name in ours}
print(json.dumps({"added": sorted(added), "presets": presets}))
"""


@pytest.fixture(scope="module")
def fresh() -> Any:
    """What an interpreter that has just started reports about the import."""
    result = subprocess.run([sys.executable, "-c", _REPORT], capture_output=True, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def test_the_import_adds_neither_deepspeed_nor_transformers(fresh: Any) -> None:
    """Importing the package costs little more than importing Lightning."""
    assert "lightning_zero" in fresh["added"]
    assert not {"deepspeed", "transformers", "accelerate", "matplotlib"} & set(fresh["added"])


def test_the_import_registers_the_names(fresh: Any) -> None:
    """Each of the seven names stands for the preset of that name in the Trainer's registry."""
    assert fresh["presets"] == {name: name for name in STRATEGIES}
