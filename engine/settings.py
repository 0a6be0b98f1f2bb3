"""A model's JSON settings, checked as they are read."""

from __future__ import annotations

import json
from pathlib import Path

from baton.core.errors import InvalidConfig, ModelNotFound


class Settings:
    """A JSON object. A value of null counts as absent; a value of the wrong kind raises."""

    def __init__(self, values: dict[str, object], name: str) -> None:
        self._values = values
        self._name = name

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def states(self, key: str) -> bool:
        """Whether `key` is there at all, be it as null."""
        return key in self._values

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(key, "a whole number", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def items(self, key: str) -> list[object]:
        value = self._get(key, [])
        if not isinstance(value, list):
            raise self._wrong(key, "a list", value)
        return value

    def nested(self, key: str) -> Settings:
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return Settings(value, f"{self._name}.{key}")

    def has_nested(self) -> bool:
        return any(isinstance(value, dict) for value in self._values.values())

    def _get(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is None:
            raise InvalidConfig(f"{self._name} lacks {key!r}", field=key)
        return default

    def _wrong(self, key: str, kind: str, value: object) -> InvalidConfig:
        return InvalidConfig(f"{self._name}: {key!r} must be {kind}, not {value!r}", field=key)


def read_settings(path: Path) -> Settings:
    """The JSON object in the file at `path`."""
    if not path.is_file():
        raise ModelNotFound(f"no model in {path.parent}: it has no config.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidConfig(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidConfig(f"{path} does not hold an object")
    return Settings(values, "config.json")
