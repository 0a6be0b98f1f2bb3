"""Prints docs/CONFIGURATION.md from core/config.py: python docs/make_configuration.py"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass

from baton.core.config import Config, Size
from baton.core.config_values import ConfigKey, keys_of

OPENING = """\
# Configuration

One YAML file describes a cluster: `baton serve --config baton.yaml`. Every process may get the
same file. Sections are nested keys, as in `router: {port: 50051}`. The flags below are those of
`baton serve`; a flag overrides the file.

An unknown key, one that is there twice, a wrong type or a value out of range is refused with the
key's name. Sizes are bytes, or text such as "512MiB" or "16GiB". Times are seconds.

This page is generated from `core/config.py` by `python docs/make_configuration.py`.
"""
VALUES = {float: "names and numbers", str: "names and strings"}
UNITS = ((2**30, "GiB"), (2**20, "MiB"))


def page() -> str:
    sections: dict[str, list[ConfigKey]] = {}
    for key in keys_of(Config):
        sections.setdefault(key.path.rpartition(".")[0], []).append(key)
    hints = typing.get_type_hints(Config)
    about = {field.name: hints[field.name].__doc__ for field in fields(Config)}
    parts = [OPENING]
    for name, keys in sections.items():
        title = f"## {name}\n\n{about[name]}\n" if name else "## Top level\n"
        parts.append("\n".join([title, *_table(keys), ""]))
    return "\n".join(parts)


def _table(keys: list[ConfigKey]) -> Iterator[str]:
    yield "| key | type | default | flag | meaning |"
    yield "|---|---|---|---|---|"
    for key in keys:
        flag = f"`{key.flag}`" if key.flag else ""
        name = key.path.rpartition(".")[2]
        cells = (f"`{name}`", _type(key.type), _default(key.default), flag, key.meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(hint: object) -> str:
    if type(None) in typing.get_args(hint):
        return _type(typing.get_args(hint)[0])
    if typing.get_origin(hint) is tuple:
        return "list of str"
    if typing.get_origin(hint) is Mapping:
        return VALUES.get(typing.get_args(hint)[1], "names and keys")
    assert isinstance(hint, type)
    assert not is_dataclass(hint)
    return "size" if hint is Size else hint.__name__


def _default(value: object) -> str:
    if value is None or value is MISSING or value in ("", ()):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, Size):
        for size, unit in UNITS:
            if value and value % size == 0:
                return f"`{value // size}{unit}`"
    return f"`{value}`"


if __name__ == "__main__":
    print(page(), end="")
