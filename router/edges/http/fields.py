"""The fields of a JSON body, each of a kind that can read it and describe it.

A field that is absent or null has its default. Whatever else is wrong raises
InvalidRequest and names the field.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Protocol

from baton.core.errors import InvalidRequest, InvalidSampling, NotServed

Json = dict[str, object]

MAX_TOKEN_ID = 2**32 - 1
_SHOWN_CHARACTERS = 40
_TOKEN_ID_PATTERN = "[0-9]{1,10}"


class Field(Protocol):
    """What a description needs of a field."""

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> Json: ...


@dataclass(frozen=True, slots=True)
class Number:
    """A number within [least, most] or, when `above`, within (least, most]."""

    name: str
    about: str
    least: float
    most: float
    default: float
    above: bool = False

    def of(self, body: Json) -> float:
        value = body.get(self.name)
        if value is None:
            return self.default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(self.name, "a number", value)
        # Not so for what is no number; exact for integers of any length.
        if not self.least <= value <= self.most or (self.above and value == self.least):
            bound = f"above {self.least:g}" if self.above else f"at least {self.least:g}"
            raise InvalidSampling(
                f"{self.name} must be {bound} and at most {self.most:g}, not {shown(value)}",
                field=self.name,
            )
        return float(value)

    @property
    def schema(self) -> Json:
        least = "exclusiveMinimum" if self.above else "minimum"
        return {
            "type": ["number", "null"],
            least: self.least,
            "maximum": self.most,
            "default": self.default,
            "description": self.about,
        }


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number within [least, most]. Its default may be to have none."""

    name: str
    about: str
    least: int
    most: int
    default: int | None = None

    def of(self, body: Json) -> int | None:
        value = body.get(self.name)
        if value is None:
            return self.default
        whole = as_integer(value)
        if whole is None:
            raise wrong_type(self.name, "an integer", value)
        if not self.least <= whole <= self.most:
            raise InvalidRequest(
                f"{self.name} must be {self.least} to {self.most}, not {shown(value)}",
                field=self.name,
            )
        return whole

    @property
    def schema(self) -> Json:
        return {
            "type": ["integer", "null"],
            "minimum": self.least,
            "maximum": self.most,
            "default": self.default,
            "description": self.about,
        }


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false; false by default."""

    name: str
    about: str

    def of(self, body: Json) -> bool:
        value = body.get(self.name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise wrong_type(self.name, "true or false", value)
        return value

    @property
    def schema(self) -> Json:
        return {"type": ["boolean", "null"], "default": False, "description": self.about}


@dataclass(frozen=True, slots=True)
class String:
    """Text of at most so many characters; empty by default."""

    name: str
    about: str
    longest: int

    def of(self, body: Json) -> str:
        value = body.get(self.name)
        return "" if value is None else as_text(value, self.name, self.longest)

    @property
    def schema(self) -> Json:
        return {
            "type": ["string", "null"],
            "maxLength": self.longest,
            "description": self.about,
        }


@dataclass(frozen=True, slots=True)
class Strings:
    """One string or a list of at most `most`, none of them empty."""

    name: str
    about: str
    most: int
    longest: int

    def of(self, body: Json) -> tuple[str, ...]:
        value = body.get(self.name)
        if value is None:
            return ()
        if not isinstance(value, str | list):
            raise wrong_type(self.name, "a string or a list of strings", value)
        items = value if isinstance(value, list) else [value]
        if len(items) > self.most:
            raise too_many(self.name, self.most)
        return tuple(self._read(item) for item in items)

    def _read(self, item: object) -> str:
        if not (text := as_text(item, self.name, self.longest)):
            raise InvalidRequest(f"{self.name} must not hold an empty string", field=self.name)
        return text

    @property
    def schema(self) -> Json:
        one = {"type": "string", "minLength": 1, "maxLength": self.longest}
        several = {"type": "array", "items": one, "maxItems": self.most}
        return {"anyOf": [one, several, {"type": "null"}], "description": self.about}


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A list of at most `most` token ids; empty by default."""

    name: str
    about: str
    most: int

    def of(self, body: Json) -> tuple[int, ...]:
        value = body.get(self.name)
        return () if value is None else as_token_ids(value, self.name, self.most)

    @property
    def schema(self) -> Json:
        return {
            "type": ["array", "null"],
            "items": TOKEN_ID_SCHEMA,
            "maxItems": self.most,
            "description": self.about,
        }


@dataclass(frozen=True, slots=True)
class Biases:
    """An object of at most `most` numbers within [-largest, largest], by token id; empty by
    default."""

    name: str
    about: str
    most: int
    largest: float

    def of(self, body: Json) -> tuple[tuple[int, float], ...]:
        value = body.get(self.name)
        if value is None:
            return ()
        if not isinstance(value, dict):
            raise wrong_type(self.name, "an object", value)
        if len(value) > self.most:
            raise too_many(self.name, self.most)
        return tuple(sorted({self._token(key): self._bias(value[key]) for key in value}.items()))

    def _token(self, key: str) -> int:
        if not re.fullmatch(_TOKEN_ID_PATTERN, key) or int(key) > MAX_TOKEN_ID:
            raise InvalidRequest(
                f"{self.name} must have token ids as its keys, not {shown(key)}", field=self.name
            )
        return int(key)

    def _bias(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(self.name, "an object of numbers", value)
        if not -self.largest <= value <= self.largest:
            raise InvalidSampling(
                f"{self.name} must be -{self.largest:g} to {self.largest:g}, not {shown(value)}",
                field=self.name,
            )
        return float(value)

    @property
    def schema(self) -> Json:
        number = {"type": "number", "minimum": -self.largest, "maximum": self.largest}
        return {
            "type": ["object", "null"],
            "propertyNames": {"pattern": f"^{_TOKEN_ID_PATTERN}$"},
            "additionalProperties": number,
            "maxProperties": self.most,
            "description": self.about,
        }


@dataclass(frozen=True, slots=True)
class Unserved:
    """A field whose meaning is not served: only values that ask for nothing pass."""

    name: str
    about: str
    harmless: tuple[object, ...] = ()

    def check(self, body: Json) -> None:
        value = body.get(self.name)
        # Compared with their types, since 0 is not false here.
        if value is not None and (type(value), value) not in (
            (type(item), item) for item in self.harmless
        ):
            raise NotServed(f"{self.name} is not served: {self.about}", field=self.name)

    @property
    def schema(self) -> Json:
        return {"enum": [*self.harmless, None], "description": f"Not served: {self.about}."}


TOKEN_ID_SCHEMA: Json = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}


def as_integer(value: object) -> int | None:
    """The whole number that a JSON number is; None when it is none."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_text(value: object, name: str, longest: int) -> str:
    if not isinstance(value, str):
        raise wrong_type(name, "a string", value)
    if len(value) > longest:
        raise InvalidRequest(f"{name} must have at most {longest} characters", field=name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name} holds half a character at {error.start}", field=name
        ) from None
    return value


def as_token_ids(value: object, name: str, most: int) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise wrong_type(name, "a list of token ids", value)
    if len(value) > most:
        raise too_many(name, most)
    # There may be a million: looked at one by one only when something is wrong.
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= MAX_TOKEN_ID:
        return tuple(value)
    return tuple(_as_token_id(item, name) for item in value)


def _as_token_id(value: object, name: str) -> int:
    whole = as_integer(value)
    if whole is None or not 0 <= whole <= MAX_TOKEN_ID:
        raise InvalidRequest(
            f"{name} must hold token ids from 0 to {MAX_TOKEN_ID}, not {shown(value)}", field=name
        )
    return whole


def wrong_type(name: str, wanted: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {wanted}, not {shown(value)}", field=name)


def too_many(name: str, most: int) -> InvalidRequest:
    return InvalidRequest(f"{name} must have at most {most} entries", field=name)


def shown(value: object) -> str:
    """A value in an error's message: as JSON, and not all of it when it is long."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
