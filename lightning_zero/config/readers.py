"""Config files and mappings, read into plain values; every complaint names the file and the place in it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hjson
import yaml

from lightning_zero.config.dotted import plain
from lightning_zero.errors import ConfigError, ConfigNotFoundError

__all__ = ["read_file", "read_mapping"]

_COMMENTS = ("#", "//", "/*")


def read_mapping(config: Mapping[str, Any], label: str) -> dict[str, Any]:
    """A mapping as fresh plain values.

    Raises:
        ConfigError: When a key is not a string.
    """
    _refuse_other_keys(config, label)
    values: dict[str, Any] = plain(config)
    return values


def read_file(path: str | os.PathLike[str], *, said_by: str = "") -> dict[str, Any]:
    """The values of a DeepSpeed JSON (comments allowed) or, by its ending, a YAML file.

    Args:
        path: The file.
        said_by: Who names the file when it is not the user's own argument, for messages: `` (A_VARIABLE)``.

    Raises:
        ConfigNotFoundError: When there is no such file.
        ConfigError: When it is a folder, cannot be read, is broken, repeats a key or does not hold a mapping.
    """
    file = Path(path).expanduser()
    place = f"config file {file}{said_by}"
    text = _read_text(file, place)
    values = _parse_yaml(text, place) if file.suffix.lower() in (".yaml", ".yml") else _parse_json(text, place)
    if not isinstance(values, Mapping):
        kind = type(values).__name__
        raise ConfigError(f"{place}: holds a {kind} where a mapping belongs. Write DeepSpeed's keys inside {{}}.")
    return read_mapping(values, f"config file {file.name}{said_by}")


def _read_text(file: Path, place: str) -> str:
    if file.is_dir():
        raise ConfigError(f"{place}: is a folder. Pass the JSON or YAML file inside it.")
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigNotFoundError(
            f"{place}: is not there, seen from {Path.cwd()}. Check the path or pass an absolute one."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: cannot be read ({error}). Pass a readable UTF-8 file.") from error


def _refuse_other_keys(values: Any, label: str) -> None:
    if isinstance(values, Mapping):
        for key, value in values.items():
            if not isinstance(key, str):
                raise ConfigError(f"{key!r}: is a key in {label} and not a string. Write DeepSpeed's key names.")
            _refuse_other_keys(value, label)
    elif isinstance(values, (list, tuple)):
        for value in values:
            _refuse_other_keys(value, label)


def _parse_json(text: str, place: str) -> Any:
    """Strict JSON where it is, else Hjson (JSON with comments), which is what DeepSpeed reads."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return _without_repeats(pairs, place)

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        strict = error
    try:
        values = hjson.loads(text, object_pairs_hook=once)
    except hjson.HjsonDecodeError as error:
        if text[strict.pos :].lstrip().startswith(_COMMENTS):  # strict JSON stumbled over a comment only
            raise _broken(place, error.lineno, error.colno, error.msg) from error
        raise _broken(place, strict.lineno, strict.colno, strict.msg) from error
    swallowed = _swallowed_key(values)
    if swallowed:
        before = text[: text.find(swallowed)]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise _broken(place, line, column, "a comma is missing after this value")
    return values


def _swallowed_key(value: Any) -> str | None:
    """A string in which Hjson, for want of a comma, took a value and the next key for one word (``1 "b": 2``)."""
    if isinstance(value, (Mapping, list)):
        entries = value.values() if isinstance(value, Mapping) else value
        return next(filter(None, map(_swallowed_key, entries)), None)
    return value if isinstance(value, str) and '":' in value.replace(" ", "") else None


class _OnceLoader(yaml.SafeLoader):
    """YAML's safe loader, which refuses a repeated key instead of taking the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f'key "{key.value}" stands twice', key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str, place: str) -> Any:
    try:
        return yaml.load(text, Loader=_OnceLoader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise _broken(place, line, column, str(error.problem)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{place}: is not YAML ({error}). Correct the file.") from error


def _without_repeats(pairs: list[tuple[str, Any]], place: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ConfigError(f'{place}: the key "{key}" stands twice in one section. Remove one of them.')
        values[key] = value
    return values


def _broken(place: str, line: int, column: int, reason: str) -> ConfigError:
    return ConfigError(f"{place}, line {line}, column {column}: {reason}. Correct the file there.")
