"""Documented, checked keys of a configuration: from plain values to frozen dataclasses and back."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import yaml

from baton.core.errors import InvalidConfig

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")

Check = tuple[Callable[[typing.Any], bool], str]
"""Whether a value is allowed, and what it must be."""

POSITIVE: Check = (lambda value: value > 0, "must be above 0")
NOT_NEGATIVE: Check = (lambda value: value >= 0, "must be 0 or more")
SHARE: Check = (lambda value: 0 < value <= 1, "must be above 0 and at most 1")
SHARE_OR_NONE: Check = (lambda value: 0 <= value <= 1, "must be from 0 to 1")
PORT: Check = (lambda value: 0 <= value <= 65535, "must be a port, 0 to 65535")
NICENESS: Check = (lambda value: 0 <= value <= 19, "must be from 0 to 19")


def one_of(*names: str) -> Check:
    return (lambda value: value in names), f"must be one of {', '.join(names)}"


def key(default: object, meaning: str, check: Check | None = None, flag: str = "") -> typing.Any:
    """A dataclass field. `flag` is its flag of `baton serve`; several keys may share one."""
    metadata = {"meaning": meaning, "check": check, "flag": flag}
    if default is dict:
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class ConfigKey(typing.NamedTuple):
    path: str  # dotted
    type: typing.Any
    default: object
    meaning: str
    flag: str


def keys_of(config: type, prefix: str = "") -> Iterator[ConfigKey]:
    """Every key of a configuration class, those of its sections included."""
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        path, hint = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from keys_of(typing.cast(type, hint), f"{path}.")
        else:
            about = field.metadata
            yield ConfigKey(path, hint, field.default, about["meaning"], about["flag"])


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


def read_yaml(path: Path) -> dict[str, object]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path} is not valid YAML: {error}") from error
    if not isinstance(tree, dict | None):
        raise InvalidConfig(f"{path} must hold keys and values")
    return tree or {}


def set_dotted(tree: dict[str, object], dotted: str, value: object) -> None:
    *parents, leaf = dotted.split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            raise InvalidConfig(f"{parent} must hold keys and values", field=parent)
        tree = child
    tree[leaf] = value


def build(cls: type, tree: object, path: str = "") -> object:
    """A dataclass from names and values; `path` is its place in the whole."""
    if not isinstance(tree, Mapping):
        raise InvalidConfig(f"{path} must hold keys and values", field=path)
    fields = {item.name: item for item in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values: dict[str, object] = {}
    for name, value in tree.items():
        inner = f"{path}.{name}" if path else f"{name}"
        if name not in fields:
            nearest = difflib.get_close_matches(str(name), fields, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known keys: {', '.join(fields)}"
            raise InvalidConfig(f"unknown key {inner}; {hint}", field=inner)
        values[name] = _convert(hints[name], value, inner)
        allowed, rule = fields[name].metadata.get("check") or (lambda _: True, "")
        if values[name] is not None and not allowed(values[name]):
            raise InvalidConfig(f"{inner} {rule}, not {value!r}", field=inner)
    return cls(**values)


def _convert(hint: typing.Any, value: object, path: str) -> object:
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, path)
    if isinstance(hint, types.UnionType):
        return None if value is None else _convert(typing.get_args(hint)[0], value, path)
    if hint is Size:
        try:
            return Size.parse(value)
        except ValueError as error:
            raise InvalidConfig(f"{path}: {error}, not {value!r}", field=path) from None
    if typing.get_origin(hint) is tuple:
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise InvalidConfig(f"{path} must be a list of strings, not {value!r}", field=path)
    if typing.get_origin(hint) is Mapping:
        if isinstance(value, Mapping):
            return {str(name): _scalar(float, n, f"{path}.{name}") for name, n in value.items()}
        raise InvalidConfig(f"{path} must hold names and numbers, not {value!r}", field=path)
    return _scalar(hint, value, path)


def _scalar(hint: type, value: object, path: str) -> object:
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise InvalidConfig(f"{path} must be {hint.__name__}, not {value!r}", field=path)
    return value
