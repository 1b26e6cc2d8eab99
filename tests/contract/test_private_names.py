"""Every private foreign name that `_compat` reaches for has a contract test, by name."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import lightning.pytorch  # noqa: F401  # its first import sets environment variables, which no test may
import pytest
from deepspeed.accelerator import get_accelerator

get_accelerator()  # so does its first call

FOREIGN = ("lightning.", "deepspeed.", "torch.", "transformers.")
COMPAT = Path(__file__).parents[2] / "lightning_zero" / "_compat"

# What `_compat` imports under a private name, or from where nothing is documented.
IMPORTED = [
    ("lightning.fabric.plugins.collectives.torch_collective", "default_pg_timeout"),
    ("lightning.fabric.strategies.deepspeed", "_validate_device_index_selection"),
    ("lightning.fabric.utilities.imports", "_IS_INTERACTIVE"),
    ("lightning.pytorch.core.optimizer", "_init_optimizers_and_lr_schedulers"),
    ("lightning.pytorch.core.saving", "_load_state"),
    ("lightning.pytorch.plugins.precision.deepspeed", "DeepSpeedPrecision"),
    ("lightning.pytorch.trainer.call", "_call_lightning_module_hook"),
    ("lightning.pytorch.utilities.combined_loader", "CombinedLoader"),
    ("lightning.pytorch.utilities.model_helpers", "is_overridden"),
    ("deepspeed.accelerator", "get_accelerator"),
    ("deepspeed.comm", "comm"),
    ("deepspeed.git_version_info", "accelerator_name"),
    ("deepspeed.git_version_info", "installed_ops"),
    ("deepspeed.runtime.zero", "parameter_offload"),
    ("deepspeed.utils", "safe_get_local_fp32_param"),
    ("deepspeed.utils", "safe_get_local_grad"),
    ("torch.utils", "cpp_extension"),
    ("deepspeed.runtime.zero", "partition_parameters"),
    ("deepspeed.runtime.zero.partition_parameters", "DeepSpeedTensorOverride"),
    ("deepspeed.runtime.zero.partition_parameters", "Init"),
    ("transformers.initialization", "guard_torch_init_functions"),
    ("transformers.integrations", "HfDeepSpeedConfig"),
    ("transformers.integrations", "deepspeed"),
    ("transformers.integrations", "is_deepspeed_zero3_enabled"),
    ("transformers.modeling_utils", "is_deepspeed_zero3_enabled"),
    ("transformers.modeling_utils", "load_state_dict"),
    ("transformers.modeling_utils", "set_zero3_state"),
]

# Private attributes that `_compat` reads or sets -> the module of this folder that holds them to their meaning.
ATTRIBUTES = {
    "_checkpoint_connector": "test_lightning_names",
    "_combined_loader": "test_lightning_names",
    "_combined_loader_states_to_load": "test_lightning_names",
    "_data_fetcher": "test_lightning_names",
    "_data_source": "test_lightning_names",
    "_original_handlers": "test_lightning_names",
    "_logger_connector": "test_lightning_names",
    "_reset_optimizers_and_schedulers": "test_lightning_names",
    "_signal_connector": "test_lightning_names",
    "_slurm_sigusr_handler_fn": "test_lightning_names",
    "_apply": "test_torch_names",
    "_config": "test_deepspeed_names",
    "_get_optimizer_loss_scale": "test_deepspeed_names",
    "_hp_mapping": "test_deepspeed_names",
    "_in_forward": "test_deepspeed_names",
    "_index_in_param_group": "test_deepspeed_names",
    "_offload_accumulated_param_ids": "test_deepspeed_names",
    "_offload_boundary_param_ids": "test_deepspeed_names",
    "_optimizer_has_ckpt_event_epilogue": "test_deepspeed_names",
    "_parameters": "test_deepspeed_names",
    "_post_init_method": "test_init_names",
    "_backward_epilogue": "test_fabric_names",
    "_running_engine_backward": "test_fabric_names",
    "_running_engine_backward_count": "test_fabric_names",
    "_swappable_optimizer_subgroup": "test_deepspeed_names",
    "_unmanaged_backward_count": "test_deepspeed_names",
    "_opt_called": "test_torch_names",
    "_get_build_directory": "test_build_names",
    "_hf_deepspeed_config_weak_ref": "test_transformers_names",
    "_initialize_missing_keys": "test_transformers_names",
    "_initialize_weights": "test_transformers_names",
    "_is_hf_initialized": "test_transformers_names",
    "_load_pretrained_model": "test_transformers_names",
    "_tied_params_are_equal": "test_transformers_names",
}

# Private attributes of `_compat`'s own classes.
OWN = {"_failures", "_writer"}


def _trees() -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(COMPAT.glob("*.py"))]


@pytest.mark.parametrize(("module", "name"), IMPORTED)
def test_imported_name_is_there(module: str, name: str) -> None:
    """The release still has the name where `_compat` imports it from."""
    parent = importlib.import_module(module)
    if not hasattr(parent, name):
        importlib.import_module(f"{module}.{name}")  # a module that its package does not import


def test_every_import_is_held() -> None:
    """The table above holds each `from module import name` of `_compat`, but for what torch and DeepSpeed document."""
    found = {
        (node.module, alias.name)
        for tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(FOREIGN)
        for alias in node.names
        if (node.module, alias.name) not in {("lightning.pytorch.strategies", "Strategy")}
        and node.module not in {"torch.nn", "torch.optim"}
    }
    assert found == set(IMPORTED)


def test_every_private_attribute_is_held() -> None:
    """A private attribute that comes into `_compat` has a contract test that says it by name."""
    found = {
        node.attr
        for tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
    }
    assert found - OWN == set(ATTRIBUTES)
    folder = Path(__file__).parent
    assert [name for name, module in ATTRIBUTES.items() if name not in (folder / f"{module}.py").read_text()] == []


def _class(path: str) -> type:
    module, _, name = path.rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return found


def _set_or_defined(parent: type) -> set[str]:
    """Names that a class or one of its bases defines, or sets on `self`."""
    names: set[str] = set()
    for base in parent.__mro__[:-1]:
        if base.__module__.startswith("lightning."):
            names |= set(vars(base)) | set(re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(base)))
    return names


def test_overridden_names_are_there() -> None:
    """The parents still have each name of the table of those that we override or set."""
    from lightning_zero._compat.lightning import OVERRIDDEN

    for path, names in OVERRIDDEN.items():
        assert not set(names) - _set_or_defined(_class(path)), path


@pytest.mark.parametrize(
    ("strategy", "parent"),
    [
        ("ZeroStrategy", "lightning.pytorch.strategies.DeepSpeedStrategy"),
        ("FabricZeroStrategy", "lightning.fabric.strategies.DeepSpeedStrategy"),
    ],
)
def test_every_private_override_is_in_the_table(strategy: str, parent: str) -> None:
    """A private name of a parent that one of our strategies defines, by purpose or by accident, is in the table."""
    import lightning_zero
    from lightning_zero._compat.lightning import OVERRIDDEN

    allowed = set(OVERRIDDEN[parent])
    ours = [base for base in getattr(lightning_zero, strategy).__mro__ if base.__module__.startswith("lightning_zero.")]
    theirs = _set_or_defined(_class(parent))
    for base in ours:
        defined = set(vars(base)) | set(re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(base)))
        private = {name for name in defined if name.startswith("_") and not name.startswith("__")}
        # of `abc`; ours; the fields of documented setters
        ignored = {"_abc_impl", "_session", "_cluster_environment"} | {"_precision_plugin", "_precision"}
        assert not (private & theirs) - allowed - ignored, base
