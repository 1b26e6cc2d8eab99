"""README and docs: what they show compiles, what they point to is there, what there is they tell of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import lightning_zero

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = "<!-- run -->"  # in the line before a Python block: a program of its own
COMPILE = re.compile(r"<!-- compile: (.+) -->")  # there, too: not run, for that reason


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    runs: bool
    only_compiled: str | None
    """Why the block is not run."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    fences = [number for number, line in enumerate(lines) if line.startswith("```")]
    assert len(fences) % 2 == 0, f"{page.name} has a fence without an end"
    return [
        Block(
            page=page,
            line=first + 1,
            language=lines[first][3:],
            text="\n".join(lines[first + 1 : last]),
            runs=first > 0 and lines[first - 1] == RUN,
            only_compiled=reason[1] if first > 0 and (reason := COMPILE.fullmatch(lines[first - 1])) else None,
        )
        for first, last in zip(fences[::2], fences[1::2], strict=True)
    ]


BLOCKS = [block for page in PAGES for block in blocks(page)]
RUNNABLE = [block for block in BLOCKS if block.runs]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=str)
def test_python_compiles(block: Block) -> None:
    """Every Python block is a program or a part of one."""
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in ("json", "yaml")], ids=str)
def test_data_can_be_read(block: Block) -> None:
    """Every JSON and YAML block is what it says (JSON is YAML)."""
    assert isinstance(yaml.safe_load(block.text), dict)


def test_something_is_runnable() -> None:
    """The marker is still where the tests look for it."""
    assert RUNNABLE
    assert sum(page.read_text(encoding="utf-8").count(RUN) for page in PAGES) == len(RUNNABLE)


def anchor(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    plain = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return plain.replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every link inside the repository leads to a file, and to a heading in it where it names one."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("https://", "http://")):
            continue
        name, _, fragment = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        headings = re.findall(r"^#+ (.*)$", prose(file), flags=re.MULTILINE) if file.suffix == ".md" else []
        if not file.exists() or (fragment and fragment not in map(anchor, headings)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("name", lightning_zero.__all__)
def test_every_public_name_is_told_of(name: str) -> None:
    """Every public name stands in the README or in a page of the docs."""
    assert any(re.search(rf"\b{name}\b", page.read_text(encoding="utf-8")) for page in PAGES)


def test_readme_shows_the_two_commands() -> None:
    """The first screen of the README has the commands that train and test, and the strategy's name in a Trainer."""
    screen = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:40])
    assert "make train" in screen
    assert "make test" in screen
    assert 'L.Trainer(strategy="zero3_offload"' in screen


def test_registered_names_are_told_of() -> None:
    """The README's table has a row for each registered strategy name."""
    from lightning_zero.strategies.registry import NAMES

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(zero\w+)`", readme, flags=re.MULTILINE) == list(NAMES)


def test_commands_are_told_of() -> None:
    """The README names every subcommand of `lightning-zero`, and no page names one that is not there."""
    from lightning_zero.cli.main import _MODULES, _OF_LIGHTNING

    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    told = {name: set(re.findall(r"lightning-zero ([a-z]+)\b", text)) for name, text in texts.items()}
    commands = {*_MODULES, *_OF_LIGHTNING}
    assert commands <= told["README.md"] | {"validate", "test", "predict"}
    assert set().union(*told.values()) <= commands
