"""What jsonargparse says about a wrong value, as one sentence that begins with the value's place in the YAML."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence

from lightning_zero.config.keys import nearest

__all__ = ["explained"]

_KEY = re.compile(r'Parser key "([^"]+)": *(.*)')
_PROBLEM = re.compile(r"Problem with given class_path '([^']+)':")
_NOT_ACCEPTED = re.compile(r"(?:(Subcommand) '[^']+' does not accept option|Option) '([^']+)'(?: is not accepted)?")
_EXPECTED = re.compile(r"Expected an? (?!path but)(.+?)(?:\. Got value: (.*))?$")
_GIVEN = re.compile(r"Given value: (.*)")
_NO_SUBCLASS = re.compile(r"Not a valid subclass of (\w+)")
_UNKNOWN = re.compile(r"unrecognized arguments: --([\w.-]+)")
_REQUIRED = re.compile(r"the following arguments are required: (?:fit|validate|test|predict)\.(.+)")

_KINDS = {
    "<class 'int'>": "a whole number",
    "<class 'float'>": "a number",
    "<class 'str'>": "text",
    "<class 'bool'>": "true or false",
    "<class 'NoneType'>": "null",
}
_LONGEST = 80  # characters of a value that are shown


def explained(message: str, known: Mapping[str, Sequence[str]] | None = None) -> str:
    """One sentence for jsonargparse's tree of everything that it has tried.

    Args:
        message: What jsonargparse says.
        known: Names of arguments by section, ``trainer`` and such, to suggest one for a misspelt one.

    Returns:
        The place, the value and what belongs there; the message itself where it has another form than those known.
    """
    required = _REQUIRED.match(message)
    if required:
        return f"{required[1]}: is missing, and the run needs it."
    known = known or {}
    if unknown := _UNKNOWN.match(message):
        section, _, wrong = unknown[1].rpartition(".")
        near = nearest(wrong, list(known.get(section, ())), cutoff=0.5)
        hint = f"Write {near}." if near else "See --help for what there is."
        return f"{unknown[1]}: there is no such argument. {hint}"
    place: list[str] = []
    expected: list[str] = []
    owner: str | None = None
    for line in (line.strip().removeprefix("- ") for line in message.splitlines()):
        if found := _KEY.match(line):
            place += ["init_args"] * bool(owner) + [found[1]]
            expected.clear()
            if found[2]:
                return f"{found[1]}: {found[2]}"
        elif found := _PROBLEM.match(line):
            owner = found[1]
            expected.clear()
        elif found := _NOT_ACCEPTED.match(line):
            inside = [] if found[1] else ["init_args"] * bool(owner)
            return _not_accepted([*place, *inside, *found[2].split(".")], owner, known.get("trainer", ()))
        elif owner and not expected and not place[1:] and not _is_about_types(line):
            return f"{'.'.join(place)}.class_path: {owner} cannot be used: {line}."
        elif found := _EXPECTED.match(line):
            expected.append(found[1])
            if found[2] is not None:
                return _wrong_value(place, found[2], expected)
        elif _NO_SUBCLASS.match(line):
            expected.append("a class_path with its init_args")
        elif (found := _GIVEN.match(line)) and place:
            return _wrong_value(place, found[1], expected)
    return message


def _is_about_types(line: str) -> bool:
    starts = ("Expected ", "Does not validate", "Subtypes:", "Errors:", "Given value", "Not a valid")
    return not line or line.startswith(starts)


def _not_accepted(place: list[str], owner: str | None, trainer_arguments: Iterable[str]) -> str:
    wrong = place[-1]
    whose = owner or ("the Trainer" if place[0] == "trainer" else "the command")
    names = _arguments(owner) if owner else list(trainer_arguments) if place[0] == "trainer" else []
    near = nearest(wrong, names, cutoff=0.5) if names else None
    hint = f"Write {near}." if near else "Remove it, or see --help for what there is."
    return f"{'.'.join(place)}: {whose} has no argument {wrong}. {hint}"


def _arguments(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    try:
        made = getattr(importlib.import_module(module), name)
        return [name for name in inspect.signature(made).parameters if name not in ("args", "kwargs")]
    except (ImportError, AttributeError, ValueError):  # a short name, or a class without a signature
        return []


def _wrong_value(place: list[str], given: str, expected: list[str]) -> str:
    words = [_in_words(kind) for kind in dict.fromkeys(expected)]
    if place == ["trainer", "strategy"] or place == ["trainer.strategy"]:
        words = ["a name such as zero2", "a class_path with its init_args"]
    whole = _as_whole_number(given)
    if whole and words[:1] == ["a whole number"]:
        words[0] += f" such as {whole}"
    shown = given if len(given) <= _LONGEST else given[:_LONGEST] + "..."
    kind = " the list" if given.startswith("[") else ""
    wanted = " or ".join(words) if words else "another value"
    return f"{'.'.join(place)}: is{kind} {shown}. Write {wanted}."


def _in_words(kind: str) -> str:
    if kind.startswith("typing.Literal["):
        return kind.removeprefix("typing.Literal[").removesuffix("]")
    return _KINDS.get(kind, kind)


def _as_whole_number(given: str) -> str | None:
    """``500000000`` for ``500000000.0``, which is what ``5e8`` in a YAML file is."""
    try:
        number = float(given)
    except ValueError:
        return None
    return str(int(number)) if number.is_integer() and not given.lstrip("-").isdigit() else None
