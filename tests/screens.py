"""The text screens in the docs, made by the code: ``python -m tests.screens`` writes them into the pages again.

A screen is a fenced block after the line ``<!-- screen -->``: a ``console`` block shows what the command in its first
line prints, a ``text`` block what the Python block before it does.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARK = "<!-- screen -->"
CHECKPOINT = ROOT / "tests" / "data" / "checkpoints" / "deepspeed-stage3-bf16"
_WIDTH = "120"


@dataclass(frozen=True)
class Screen:
    """One screen of a page."""

    page: Path
    command: str
    """A command line, or the Python program whose output it is."""

    is_python: bool
    shown: str
    """What the page shows."""

    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.page.name}: {'Python' if self.is_python else self.command}"


def screens(page: Path) -> Iterator[Screen]:
    """The screens of a page, in order."""
    text = page.read_text(encoding="utf-8")
    program = ""
    for block in re.finditer(r"^```(\w+)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        language, inside = block[1], block[2]
        if language == "python":
            program = inside
        if not text[: block.start()].endswith(f"{MARK}\n"):
            continue
        if language == "text":
            yield Screen(page, program, True, inside, block.start(2), block.end(2))
            continue
        first, _, rest = inside.partition("\n")
        begin = block.start(2) + len(first) + 1
        yield Screen(page, first.removeprefix("$ "), False, rest, begin, block.end(2))


def printed(screen: Screen) -> str:
    """What a screen's command prints, or says on standard error when it is refused; in a folder of its own."""
    from lightning_zero.cli.main import main

    before, columns = Path.cwd(), os.environ.get("COLUMNS")
    out, error = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(out), redirect_stderr(error):
        for name, target in (("configs", ROOT / "configs"), ("last.ckpt", CHECKPOINT)):
            (Path(folder) / name).symlink_to(target)
        os.chdir(folder)
        os.environ["COLUMNS"] = _WIDTH
        try:
            main(screen.command.split()[1:])
        finally:
            os.chdir(before)
            os.environ.pop("COLUMNS")
            if columns is not None:
                os.environ["COLUMNS"] = columns
    refusal = re.search(r"^lightning-zero \w+: .*", error.getvalue(), flags=re.DOTALL | re.MULTILINE)
    output = out.getvalue() or (refusal[0] if refusal else error.getvalue())
    return tidy(output.replace(f"{folder}/", ""))


def output_of(program: str, folder: Path) -> str:
    """What a Python program prints, without what DeepSpeed says of itself.

    Args:
        program: The program.
        folder: Where it runs.

    Raises:
        RuntimeError: It failed.
    """
    script = folder / "script.py"
    script.write_text(program)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": _WIDTH, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(script)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    own = [line for line in done.stdout.splitlines() if not line.startswith(("[20", "DeepSpeed deepspeed."))]
    return tidy("\n".join(own))


def tidy(text: str) -> str:
    """Lines without trailing spaces, and no empty ones around them."""
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"


def write(page: Path) -> None:
    """Makes every screen of a page again."""
    for screen in reversed(list(screens(page))):
        with tempfile.TemporaryDirectory() as folder:
            new = output_of(screen.command, Path(folder)) if screen.is_python else printed(screen)
        text = page.read_text(encoding="utf-8")
        page.write_text(text[: screen.begin] + new + text[screen.end :], encoding="utf-8")


if __name__ == "__main__":
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        write(path)
