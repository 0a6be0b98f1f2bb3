"""Documented, checked configuration keys, and the conversion of plain values to dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import yaml

from baton.core.errors import InvalidConfig

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")

_NAME = re.compile(r"[\w.@:+-]+(/[\w.@:+-]+)*")
_NAME_LENGTH = 128
NAME_RULE = f"letters, digits, and . _ - / @ : +, at most {_NAME_LENGTH}"

Check = tuple[Callable[[typing.Any], bool], str]
"""A predicate of allowed values, and the rule in words."""


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


_POSITIVE: Check = (lambda value: value > 0, "must be above 0")
_NOT_NEGATIVE: Check = (lambda value: value >= 0, "must be 0 or more")

MAX_WORKERS = 1024
"""Upper limit of a pool: more is a typing error."""

PositiveInt = Annotated[int, _POSITIVE]
PositiveFloat = Annotated[float, _POSITIVE]
NonNegativeInt = Annotated[int, _NOT_NEGATIVE]
NonNegativeFloat = Annotated[float, _NOT_NEGATIVE]
Bytes = Annotated[Size, _NOT_NEGATIVE]
Share = Annotated[float, (lambda value: 0 < value <= 1, "must be above 0 and at most 1")]
ShareOrNone = Annotated[float, (lambda value: 0 <= value <= 1, "must be from 0 to 1")]
Port = Annotated[int, (lambda value: 0 <= value <= 65535, "must be a port, 0 to 65535")]
WorkerCount = Annotated[
    int, (lambda value: 1 <= value <= MAX_WORKERS, f"must be from 1 to {MAX_WORKERS}")
]
Niceness = Annotated[int, (lambda value: 0 <= value <= 19, "must be from 0 to 19")]
Origins = Annotated[
    tuple[str, ...],
    (
        lambda value: all(each == "*" or _ORIGIN.fullmatch(each) for each in value),
        'must have origins such as "https://chat.example.com" (no path), or "*"',
    ),
]


def is_name(name: str) -> bool:
    """True if a model or an adapter may have this name."""
    return len(name) <= _NAME_LENGTH and _NAME.fullmatch(name) is not None


def key(default: object, meaning: str, flag: str = "") -> typing.Any:
    """A dataclass field. `flag` is its flag of `baton serve`; several keys may share one."""
    metadata = {"meaning": meaning, "flag": flag}
    if default is dict:
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class ConfigKey(typing.NamedTuple):
    path: str  # dotted
    type: typing.Any  # without its check
    default: object
    meaning: str
    flag: str


def keys_of(config: type, prefix: str = "") -> Iterator[ConfigKey]:
    """Every key of a configuration class, including those of its sections."""
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        path, hint = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from keys_of(typing.cast(type, hint), f"{path}.")
        else:
            about = field.metadata
            plain = str if typing.get_origin(hint) is typing.Literal else hint
            yield ConfigKey(path, plain, field.default, about["meaning"], about["flag"])


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, of which YAML's own reader drops the first."""

    def compose_mapping_node(self, anchor: typing.Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value} is there twice", problem_mark=key.start_mark
                    )
                seen.add((key.tag, key.value))
        return node


def parse_yaml(text: str) -> object:
    loader = _UniqueKeys(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def read_yaml(path: Path) -> dict[str, object]:
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
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
    """Builds a dataclass from names and values. `path` is its place in the configuration."""
    if not isinstance(tree, Mapping):
        raise InvalidConfig(f"{path} must hold keys and values", field=path)
    hints = typing.get_type_hints(cls, include_extras=True)
    values: dict[str, object] = {}
    for name, value in tree.items():
        inner = f"{path}.{name}" if path else f"{name}"
        if name not in hints:
            nearest = difflib.get_close_matches(str(name), hints, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known keys: {', '.join(hints)}"
            raise InvalidConfig(f"unknown key {inner}; {hint}", field=inner)
        values[name] = _convert(hints[name], value, inner)
    return cls(**values)


def _convert(hint: typing.Any, value: object, path: str) -> object:
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, path)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        converted = _convert(arguments[0], value, path)
        allowed, rule = arguments[1]
        if not allowed(converted):
            raise InvalidConfig(f"{path} {rule}, not {value!r}", field=path)
        return converted
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _convert(arguments[0], value, path)
    if origin is typing.Literal:
        if isinstance(value, bool):  # YAML's meaning of on and off
            value = "on" if value else "off"
        if _scalar(str, value, path) not in arguments:
            names = ", ".join(arguments)
            raise InvalidConfig(f"{path} must be one of {names}, not {value!r}", field=path)
        return value
    if hint is Size:
        try:
            return Size.parse(value)
        except ValueError as error:
            raise InvalidConfig(f"{path}: {error}, not {value!r}", field=path) from None
    if origin is tuple:
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise InvalidConfig(f"{path} must be a list of strings, not {value!r}", field=path)
    if origin is Mapping:
        if isinstance(value, Mapping):
            kind = arguments[1]
            if typing.get_origin(kind) is Mapping:
                return {str(name): _tree(each, f"{path}.{name}") for name, each in value.items()}
            return {str(name): _scalar(kind, n, f"{path}.{name}") for name, n in value.items()}
        values = _VALUE_NAMES.get(arguments[1], "keys and values of each")
        raise InvalidConfig(f"{path} must hold names and {values}, not {value!r}", field=path)
    return _scalar(hint, value, path)


_VALUE_NAMES = {float: "numbers", str: "strings"}


def _tree(value: object, path: str) -> dict[str, object]:
    """A part of a document whose content is checked where it is used."""
    if not isinstance(value, Mapping):
        raise InvalidConfig(f"{path} must hold keys and values", field=path)
    return {str(name): each for name, each in value.items()}


def _scalar(hint: type, value: object, path: str) -> object:
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise InvalidConfig(f"{path} must be {hint.__name__}, not {value!r}", field=path)
    return value
