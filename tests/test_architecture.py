"""Who may import whom, read from the source: a package that reaches where it must not fails here, by file and line."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.forkserver import REPOSITORY

PACKAGE = REPOSITORY / "lightning_zero"
MODULES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES = 400
EVERYWHERE = {"typing_extensions"}  # typing of newer Pythons, part of the language
ANYTHING = frozenset({"*"})


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a package may import besides the standard library and itself."""

    foreign: frozenset[str] = frozenset()  # anywhere
    lazily: frozenset[str] = frozenset()  # inside functions, or for type checkers only
    ours: frozenset[str] = frozenset({"errors"})  # our packages; "_compat.x" is one module (and "_compat.x_more")


def names(text: str) -> frozenset[str]:
    """A set of words."""
    return frozenset(text.split())


PURE = Rule(foreign=names("torch safetensors numpy"), ours=names("errors checkpoint export memory"))
LIGHTNING = Rule(
    foreign=names("lightning torch"),
    ours=names("errors _compat engine config checkpoint export integrations strategies callbacks memory"),
)
RULES = {
    "": Rule(ours=ANYTHING),  # __init__.py, which gathers the public names
    "__main__": Rule(ours=names("cli")),
    "errors": Rule(ours=frozenset()),
    "config": Rule(foreign=names("yaml hjson"), lazily=names("rich")),
    "checkpoint": PURE,
    "export": PURE,
    "memory": PURE,
    "engine": Rule(
        foreign=names("torch psutil"),
        lazily=names("deepspeed ninja"),
        ours=names("errors config _compat.deepspeed _compat.torch"),
    ),
    "integrations": Rule(
        foreign=names("torch"), lazily=names("transformers peft"), ours=names("errors _compat.transformers")
    ),
    "strategies": LIGHTNING,
    "callbacks": LIGHTNING,
    "cli": Rule(foreign=names("jsonargparse rich"), lazily=ANYTHING, ours=ANYTHING),
    # One module of a package may have a row of its own: these derive from Lightning's classes.
    "cli.zero_cli": Rule(foreign=names("jsonargparse lightning"), ours=ANYTHING),
    "cli.foreseeing_cli": Rule(foreign=names("lightning"), ours=ANYTHING),
    "cli.progress_lines": Rule(foreign=names("lightning torch"), ours=ANYTHING),
}


@dataclass(frozen=True)
class Import:
    """One imported module, e.g. ``lightning_zero.config.facts``."""

    name: str
    line: int
    lazy: bool


def rule_of(module: str) -> Rule:
    """The rule for a module of ours, by its dotted name without ``lightning_zero``."""
    package, _, rest = module.partition(".")
    if package == "_compat":
        foreign = rest.partition("_")[0]  # "deepspeed_ops" is named after deepspeed
        return Rule(foreign=frozenset({foreign, "torch"}))  # all of them speak in torch's types
    return RULES.get(module) or RULES[package]


def imports(tree: ast.Module, package: str) -> Iterator[Import]:
    """Every import of a module; `package` is what its relative ones are relative to."""
    yield from _imports(tree, package, lazy=False)


def _imports(node: ast.AST, package: str, *, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (Import(name, child.lineno, lazy) for name in _names_from(child, package))
        elif isinstance(child, ast.Call) and _function_name(child) in ("import_module", "__import__"):
            yield from (Import(a.value, child.lineno, True) for a in child.args[:1] if isinstance(a, ast.Constant))
        inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or _is_for_type_checkers(child)
        yield from _imports(child, package, lazy=lazy or inside)


def _names_from(node: ast.ImportFrom, package: str) -> list[str]:
    parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    module = ".".join([*parents, *filter(None, [node.module])])
    # `from lightning_zero import config` imports a package of ours, not the top one; each module of _compat counts too
    splits = module in (PACKAGE.name, f"{PACKAGE.name}._compat")
    return [f"{module}.{alias.name}" for alias in node.names] if splits else [module]


def _function_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def is_allowed(imported: Import, module: str, rule: Rule) -> bool:
    """Whether the rule lets the module (dotted, without ``lightning_zero``) import this."""
    top, _, rest = imported.name.partition(".")
    if top == PACKAGE.name:
        own = module.partition(".")[0]
        wanted = {"*", rest.partition(".")[0], rest.partition("_")[0], *_compat_names(rest)}
        return bool(wanted & rule.ours) or rest.partition(".")[0] == own != "_compat"
    if top in sys.stdlib_module_names or top in EVERYWHERE | rule.foreign:
        return True
    return imported.lazy and bool({"*", top} & rule.lazily)


def _compat_names(rest: str) -> set[str]:
    """``_compat`` and the module in it that grants access: ``_compat.torch`` for ``_compat.torch_extensions``."""
    package, _, module = rest.partition(".")
    return {f"_compat.{module.partition('.')[0].partition('_')[0]}"} if package == "_compat" else set()


def violations(source: str, module: str) -> list[str]:
    """Forbidden imports in the source of a module, each with its line."""
    package = ".".join([PACKAGE.name, *module.split(".")[:-1]])
    rule = rule_of(module)
    found = imports(ast.parse(source), package)
    return [f"line {i.line}: {i.name}" for i in found if not is_allowed(i, module, rule)]


def dotted(path: Path) -> str:
    """Name of a module of ours without ``lightning_zero``; a package's is that of its `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else ".".join(parts)


@pytest.mark.parametrize("path", MODULES, ids=[str(path.relative_to(PACKAGE)) for path in MODULES])
def test_imports_follow_the_table(path: Path) -> None:
    """Each module imports only what the table grants to its package."""
    assert violations(path.read_text(), dotted(path)) == []


def test_every_package_has_a_rule() -> None:
    """A new package needs a row in the table."""
    found = {dotted(path).partition(".")[0] for path in MODULES}
    assert found <= {*RULES, "_compat"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("config.rules", "import torch"),
        ("config.rules", "def f():\n    from torch.nn import Module"),
        ("config.rules", "if TYPE_CHECKING:\n    import lightning"),
        ("config.rules", "from lightning_zero.engine import ops"),
        ("config.rules", "from lightning_zero import engine"),
        ("config.rules", "from ..engine import ops"),
        ("checkpoint.merge", "import deepspeed"),
        ("checkpoint.merge", "from lightning_zero.config.facts import RunFacts"),
        ("checkpoint.merge", "import importlib\nimportlib.import_module('deepspeed.checkpoint')"),
        ("engine.ops", "import deepspeed"),
        ("engine.ops", "class A:\n    import deepspeed"),
        ("engine.ops", "def f():\n    import lightning.pytorch"),
        ("engine.ops", "from lightning_zero._compat.lightning import x"),
        ("engine.ops", "from lightning_zero._compat import lightning"),
        ("strategies.trainer", "def f():\n    import deepspeed"),
        ("strategies.trainer", "import pytorch_lightning"),
        ("cli.main", "import torch"),
        ("_compat.deepspeed_ops", "import lightning"),
        ("_compat.deepspeed_ops", "from lightning_zero._compat.torch import x"),
        ("_compat.lightning", "from lightning_zero.engine import ops"),
        ("errors", "from lightning_zero.config import rules"),
        ("__main__", "from lightning_zero.engine import ops"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    """Every way to write a forbidden import is seen: lazy, relative, for type checkers, by name."""
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("", "from lightning_zero.strategies.trainer import ZeroStrategy"),
        ("__main__", "from lightning_zero.cli.main import main"),
        ("config.rules", "import json, os.path\nimport yaml, hjson\nfrom lightning_zero.errors import ConfigError"),
        ("config.rules", "from lightning_zero.config import facts\nfrom . import facts\nfrom .facts import RunFacts"),
        ("engine.ops", "import torch\ndef f():\n    import deepspeed.comm"),
        ("engine.ops", "if TYPE_CHECKING:\n    from deepspeed import DeepSpeedEngine"),
        (
            "engine.ops",
            "from lightning_zero._compat.torch_extensions import x\nfrom lightning_zero._compat import torch",
        ),
        ("strategies.trainer", "from lightning_zero._compat import lightning as _lightning"),
        ("strategies.trainer", "import lightning.pytorch as pl\nfrom lightning_zero.callbacks.best_model import x"),
        ("cli.main", "def f():\n    import torch\n    from lightning_zero.checkpoint import verify"),
        ("_compat.deepspeed_ops", "import deepspeed\nfrom lightning_zero.errors import ZeroError"),
    ],
)
def test_an_allowed_import_passes(module: str, source: str) -> None:
    """What the table grants is not reported."""
    assert violations(source, module) == []


@pytest.mark.parametrize("path", MODULES, ids=[str(path.relative_to(PACKAGE)) for path in MODULES])
def test_modules_stay_small(path: Path) -> None:
    """A module that grows over the limit is two modules."""
    assert len(path.read_text().splitlines()) <= MOST_LINES


def test_no_module_is_named_after_nothing() -> None:
    """A file's name says what is in it."""
    stems = {path.stem for path in MODULES} | {path.parent.name for path in MODULES}
    assert not stems & names("utils util helpers helper common misc base")
