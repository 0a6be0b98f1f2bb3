"""From plain values to frozen dataclasses and back: what core/config.py is read with."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path

import yaml

from baton.core.errors import InvalidConfig

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class Size(int):
    """A number of bytes, written as 1073741824, "1GiB" or "512 MiB"."""

    @classmethod
    def parse(cls, value: object) -> Size:
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(value)
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError('expected a size such as "1GiB"')
        return cls(float(match[1]) * _UNITS[match[2].upper()])


def plain(value: object) -> object:
    """Values that YAML and JSON know."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return list(value)
    return int(value) if isinstance(value, Size) else value


def read_yaml(path: Path) -> dict[str, object]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path} is not valid YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise InvalidConfig(f"{path} must hold keys and values")
    return tree


def set_dotted(tree: dict[str, object], dotted: str, value: object) -> None:
    *parents, leaf = dotted.split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            raise InvalidConfig(f"{parent} must hold keys and values", field=parent)
        tree = child
    tree[leaf] = value


def build(cls: type, tree: Mapping[str, object], prefix: str) -> object:
    """A dataclass from names and values; `prefix` is where it is in the whole."""
    fields = {item.name: item for item in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values: dict[str, object] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if key not in fields:
            raise InvalidConfig(_unknown_key(path, str(key), list(fields)), field=path)
        values[key] = _convert(hints[key], value, path)
        check = fields[key].metadata.get("check")
        problem = check(values[key]) if check and values[key] is not None else ""
        if problem:
            raise InvalidConfig(f"{path} {problem}, not {value!r}", field=path)
    return cls(**values)


def _unknown_key(path: str, key: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known keys: {', '.join(known)}"
    return f"unknown key {path}; {hint}"


def _convert(hint: typing.Any, value: object, path: str) -> object:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise InvalidConfig(f"{path} must hold keys and values", field=path)
        return build(typing.cast(type, hint), value, f"{path}.")
    if isinstance(hint, types.UnionType):
        inner, _ = typing.get_args(hint)
        return None if value is None else _convert(inner, value, path)
    if hint is Size:
        try:
            return Size.parse(value)
        except ValueError as error:
            raise InvalidConfig(f"{path}: {error}, not {value!r}", field=path) from None
    if typing.get_origin(hint) is tuple:
        return _strings(value, path)
    if typing.get_origin(hint) is Mapping:
        return _amounts(value, path)
    return _scalar(hint, value, path)


def _strings(value: object, path: str) -> tuple[str, ...]:
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise InvalidConfig(f"{path} must be a list of strings, not {value!r}", field=path)


def _amounts(value: object, path: str) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise InvalidConfig(f"{path} must hold names and numbers, not {value!r}", field=path)
    amounts = {str(name): _scalar(float, item, f"{path}.{name}") for name, item in value.items()}
    return typing.cast(dict[str, float], amounts)


def _scalar(hint: type, value: object, path: str) -> object:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise InvalidConfig(f"{path} must be {hint.__name__}, not {value!r}", field=path)
    return value
