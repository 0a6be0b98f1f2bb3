"""Base of the request body models: strict types, our own errors, OpenAPI schemas.

A null field counts as absent. Unknown fields are ignored, since clients of the OpenAI API send
fields for other servers. Fields that would change the answer and are not served are refused by
name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from baton.core.bounds import MAX_TOKEN_ID, SAMPLING
from baton.core.errors import InvalidRequest, InvalidSampling, NotServed
from baton.core.proto_json import Json

# An error in an item of these names the list or object, not the item.
_FLAT = {"stop", "logit_bias", "prompt", "bad_words_ids"}
_OUT_OF_RANGE = {"greater_than", "greater_than_equal", "less_than_equal", "float_type"}
_NOT_SERVED = "not_served"
_SHOWN_CHARACTERS = 40
DURATION = r"^[1-9]\d{0,5}[smhd]$"
_DURATION = re.compile(DURATION)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MESSAGES = {
    "missing": "is missing",
    "string_type": "must be a string, not {value}",
    "string_unicode": "is not valid Unicode",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "must have token ids as its keys, not {value}",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must not be empty",
    "int_type": "must be an integer, not {value}",
    "float_type": "must be a number, not {value}",
    "bool_type": "must be true or false, not {value}",
    "list_type": "must be a list, not {value}",
    "dict_type": "must be an object, not {value}",
    "model_type": "must be an object, not {value}",
    "literal_error": "must be {expected}, not {value}",
    "greater_than": "must be above {gt}, not {value}",
    "greater_than_equal": "must be at least {ge}, not {value}",
    "less_than_equal": "must be at most {le}, not {value}",
}


class Unserved(NamedTuple):
    """A field that is not served. Only values without an effect pass."""

    feature: str
    harmless: tuple[object, ...] = ()

    def check(self, name: str, value: object) -> None:
        # Compares types too, since 0 == False.
        if (type(value), value) not in ((type(item), item) for item in self.harmless):
            raise PydanticCustomError(
                _NOT_SERVED, "is not served: {feature}", {"name": name, "feature": self.feature}
            )

    @property
    def schema(self) -> Json:
        return {"enum": [*self.harmless, None], "description": f"Not served: {self.feature}."}


def _document(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Completes a model's JSON schema: optional fields may be null, unserved ones are listed."""
    assert issubclass(model, RequestModel)
    properties = schema["properties"]
    null = {"type": "null"}
    for name, field in properties.items():
        if name not in schema.get("required", ()) and null not in field.get("anyOf", ()):
            notes = {key: field.pop(key) for key in ("description", "default") if key in field}
            properties[name] = {"anyOf": [field, null], **notes}
    properties.update({name: field.schema for name, field in model.unserved.items()})


class StrictModel(BaseModel):
    """Validated without Python code. Null is refused unless a field allows it."""

    model_config = ConfigDict(strict=True, frozen=True)


class RequestModel(StrictModel):
    model_config = ConfigDict(json_schema_extra=_document)
    unserved: ClassVar[dict[str, Unserved]] = {}

    @classmethod
    def parse(cls, body: object) -> Self:
        """Raises InvalidRequest with the path of the first wrong field."""
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise _refusal(error.errors(include_url=False)[0]) from None

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, body: object) -> object:
        """Drops nulls and makes 5.0 an integer, which a number field accepts as well."""
        if not isinstance(body, dict):
            return body
        given = {}
        for name, value in body.items():
            if value is None:
                continue
            if name in cls.unserved:
                cls.unserved[name].check(name, value)
            given[name] = int(value) if type(value) is float and value.is_integer() else value
        return given


def seconds_of(duration: str) -> int:
    """Parses a time such as "24h"."""
    if not _DURATION.fullmatch(duration):
        raise invalid(f'must be a time such as "24h", not {shown(duration)}')
    return int(duration[:-1]) * _UNITS[duration[-1]]


def tag_by_type(default: str, *known: str) -> Callable[[object], str]:
    """Tags a union's value by its type. A value of another type is validated as `default`, which
    refuses it."""

    def tag(value: object) -> str:
        kind = value.get("type") if isinstance(value, dict) else None
        return f"<{kind if kind in known else default}>"

    return tag


def about(description: str, default: object = None, **constraints: Any) -> Any:
    return Field(default, description=description, **constraints)


def invalid(message: str) -> PydanticCustomError:
    """Makes a validator's error. `message` follows the field's path."""
    return PydanticCustomError("invalid", "{message}", {"message": message})


def _refusal(error: ErrorDetails) -> InvalidRequest:
    place, value = error["loc"], error["input"]
    if error["type"] == _NOT_SERVED:  # of the object at `place`
        path = _path((*place, error["ctx"]["name"]))
        return NotServed(f"{path} {error['msg']}", field=path)
    if place and place[0] in _FLAT:
        place = place[:1]
    field = path = _path(place)
    kind = InvalidRequest
    if place and place[-1] == "type":
        # An unknown type of a part, a tool or a response format is a feature that is not served.
        kind, field = NotServed, path if place[0] == "messages" else str(place[0])
    elif error["type"] in _OUT_OF_RANGE and field in (*SAMPLING, "logit_bias"):
        kind = InvalidSampling if type(value) in (int, float) else InvalidRequest
    return kind(f"{path} {_message(error)}", field=field)


def _message(error: ErrorDetails) -> str:
    value = error["input"]
    if error["type"] == "float_type" and type(value) is int:
        return "is too large"
    template = _MESSAGES.get(error["type"])
    if template is None:
        return error["msg"]
    details = {
        key: f"{item:g}" if isinstance(item, float) else item
        for key, item in error.get("ctx", {}).items()
    }
    return template.format(value=shown(value), **details)


def _path(place: tuple[int | str, ...]) -> str:
    """Renders a path such as messages[0].content, without tags of unions (in angle brackets)."""
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("<"):
            path += f".{part}" if path else part
    return path


def shown(value: object) -> str:
    """Renders a value for an error message: as JSON, shortened."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


def token_ids(most: int) -> PlainValidator:
    """Validates a list of token ids. There may be a million, so they are checked one by one only if
    one is wrong."""

    def parse(value: object) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise invalid(f"must be a list of token ids, not {shown(value)}")
        if len(value) > most:
            raise invalid(f"must have at most {most} entries")
        if set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= MAX_TOKEN_ID:
            return tuple(value)
        return tuple(map(_token_id, value))

    return PlainValidator(
        parse, json_schema_input_type=Annotated[list[TokenId], Field(max_length=most)]
    )


def _token_id(value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value <= MAX_TOKEN_ID:
        raise invalid(f"must hold token ids from 0 to {MAX_TOKEN_ID}, not {shown(value)}")
    return value
