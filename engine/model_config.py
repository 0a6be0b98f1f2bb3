"""Typed access to a model's config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from baton.core.errors import InvalidConfig, ModelNotFound


class ModelConfig:
    """The JSON object of a config.json. null counts as absent; a wrong type raises."""

    def __init__(self, values: dict[str, object], name: str = "config.json") -> None:
        self._values = values
        self._name = name

    @classmethod
    def read(cls, path: Path) -> ModelConfig:
        if not path.is_file():
            raise ModelNotFound(f"no model in {path.parent}: it has no config.json")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InvalidConfig(f"{path} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise InvalidConfig(f"{path} does not hold an object")
        return cls(values)

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether `key` is present, as null."""
        return key in self._values and key not in self

    def integer(self, key: str, default: int | None = None) -> int:
        value: int = self._get(key, default, "a whole number", int)
        if value < 0:
            raise self._wrong(key, "a whole number", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._get(key, default, "a number", int, float))

    def flag(self, key: str, default: bool) -> bool:
        value: bool = self._get(key, default, "true or false", bool)
        return value

    def text(self, key: str, default: str) -> str:
        value: str = self._get(key, default, "a string", str)
        return value

    def items(self, key: str) -> list[object]:
        value: list[object] = self._get(key, [], "a list", list)
        return value

    def nested(self, key: str) -> ModelConfig:
        return ModelConfig(self._get(key, {}, "an object", dict), f"{self._name}.{key}")

    def has_nested(self) -> bool:
        return any(isinstance(value, dict) for value in self._values.values())

    def _get(self, key: str, default: object, wanted: str, *kinds: type) -> Any:
        value = self._values[key] if key in self else default
        if value is None:
            raise InvalidConfig(f"{self._name} lacks {key!r}", field=key)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self._wrong(key, wanted, value)
        return value

    def _wrong(self, key: str, wanted: str, value: object) -> InvalidConfig:
        return InvalidConfig(f"{self._name}: {key!r} must be {wanted}, not {value!r}", field=key)
