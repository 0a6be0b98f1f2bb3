"""Turns a request's structure, or a tool call that it forces, into a grammar that workers follow.
Grammars of tool calls are in llguidance's variant of Lark.

Both sides use llguidance: the router only validates a grammar (router/prompts/grammar_checks.py),
so that errors are reported at once with the field's name; workers compile it for their tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec

from baton.core.bounds import MAX_STRUCTURE
from baton.core.errors import InvalidGrammar, NotServed
from baton.core.types import Structure, Tool
from baton.router.answers.argument_types import (
    Argument,
    Schema,
    argument_schemas,
    is_scalar,
    is_text,
)
from baton.router.answers.tool_formats import MARKER, Pairs, ToolFormat
from baton.router.prompts.exact_numbers import with_exact_numbers
from baton.router.prompts.grammar_checks import GrammarChecks
from baton.router.prompts.grammar_process import ONE_LINE

ANY_OBJECT = Structure("json_schema", '{"type": "object"}')

KEPT_GRAMMARS = 256
"""Validated grammars that are remembered."""

SpecialId = Callable[[str], int | None]
"""Returns the id of a token that a grammar must name, as it is no text to llguidance; None for any
other text."""

MAX_COUNTED = 256
"""Larger maxLength values are not enforced: grammars grow with the lengths that they count."""

# Any value in Gemma's notation; `loose_text` is added with the format's quotes.
_LOOSE = """loose: loose_object | loose_list | loose_text | /-?[0-9]+([.][0-9]+)?/
    | "true" | "false" | "null"
loose_object: "{" (loose_pair ("," loose_pair)*)? "}"
loose_pair: /[a-zA-Z_][a-zA-Z0-9_]*/ ":" loose
loose_list: "[" (loose ("," loose)*)? "]\""""


_checks = GrammarChecks()


def json_structure(schema: Mapping[str, object] | None, given_as: str = "") -> Structure:
    """Returns the structure for a JSON Schema; without one, for any object."""
    if schema is None:
        return ANY_OBJECT
    return Structure("json_schema", json.dumps(schema), given_as)


def grammar_of(structure: Structure) -> str:
    """Returns the structure in llguidance's own form. Raises InvalidGrammar if it is invalid."""
    if len(structure.source) > MAX_STRUCTURE:
        raise _invalid(structure, f"more than {MAX_STRUCTURE} characters")
    return _checked(structure)


@lru_cache(KEPT_GRAMMARS)
def _checked(structure: Structure) -> str:
    if find_spec("llguidance") is None:
        raise NotServed("structured answers need llguidance, which is not installed")
    source = structure.source
    if structure.kind == "json_schema":
        try:
            source = json.dumps(with_exact_numbers(json.loads(source)), allow_nan=False)
        except (ValueError, RecursionError) as error:
            raise _invalid(structure, str(error)) from None
    grammar, fault = _checks.check(structure.kind, source)
    if fault:
        raise _invalid(structure, fault)
    return grammar


def after_reasoning(grammar: str, end: str = "</think>", token: int | None = None) -> str:
    """Returns a grammar for an answer that begins within the model's reasoning. `end` is the marker
    that ends the reasoning, `token` its id if it is a special token."""
    escaped = re.escape(end).replace("/", "\\/")
    lazy = f"reasoning[lazy]: /(.|\\n)*{escaped}/"
    rule = lazy if token is None else f"reasoning: /(.|\\n)*/ <[{token}]>"
    return within(f"start: reasoning /\\n{{0,2}}/ @answer\n{rule}", grammar, "answer")


def within(start: str, grammar: str, name: str) -> str:
    """Combines `start`, in Lark, with `grammar`, to which it refers by `name`."""
    return json.dumps({"grammars": [{"lark_grammar": start}, *_parts(grammar, name)]})


def either(call: str, answer: str) -> str:
    """Returns a grammar for an answer that follows either of two."""
    start = {"lark_grammar": "start: @call | @structured"}
    return json.dumps({"grammars": [start, *_parts(call, "call"), *_parts(answer, "structured")]})


def _parts(grammar: str, name: str) -> list[dict[str, object]]:
    """Returns the parts of a grammar, the first under `name`."""
    # A grammar is plain Lark, or else JSON.
    if grammar[:1] != "{":
        return [{"lark_grammar": grammar, "name": name}]
    first, *others = json.loads(grammar)["grammars"]
    return [{**first, "name": name}, *others]


def _invalid(structure: Structure, fault: str) -> InvalidGrammar:
    field = structure.request_field
    if structure.kind == "call":  # the caller has not seen this grammar, but knows the schemas
        fault = fault.partition("\n")[0].rpartition("JSON schema: ")[2]
    return InvalidGrammar(f"{field} cannot be used: {fault}", field=field)


def literal(text: str, special_id: SpecialId) -> str:
    """Returns Lark for a text, with its special tokens by id."""
    pieces = []
    for piece in filter(None, MARKER.split(text)):
        token = special_id(piece)
        pieces.append(_text(piece) if token is None else f"<[{token}]>")
    return " ".join(pieces)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Schema) -> str:
    try:
        exact = with_exact_numbers({**schema, "x-guidance": ONE_LINE})
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(f"tools cannot be used: {error}", field="tools") from None
    return f"%json {json.dumps(exact)}"


class CallGrammar:
    """Writes the grammar of one call of one of several tools."""

    def __init__(self, form: ToolFormat, special_id: SpecialId) -> None:
        self._form = form
        self._special_id = special_id

    def grammar(self, tools: Sequence[Tool]) -> str:
        if not self._form.named:
            return f"start: {self._around('call')}\ncall: {_json(self._call_schema(tools))}"
        rules = [rule for index, tool in enumerate(tools) for rule in self._call(index, tool)]
        if self._form.quote:
            rules += (_LOOSE, *self._until_end("loose_text", self._form.quote, self._form.quote))
        names = " | ".join(f"call_{index}" for index in range(len(tools)))
        return "\n".join((f"start: {self._around(f'({names})')}", *rules))

    def _literal(self, text: str) -> str:
        return literal(text, self._special_id)

    def _around(self, call: str) -> str:
        form = self._form
        if form.bare:
            return call
        begin, end = form.section[0] + form.opener + form.before, form.closer + form.section[1]
        return f"{self._literal(begin)} {call} {self._literal(end)}"

    def _call(self, index: int, tool: Tool) -> Iterator[str]:
        form = self._form
        head = f"call_{index}: {_text(tool.name)} {self._literal(form.divider)}"
        if not (form.pairs or form.quote):
            yield f"{head} arguments_{index}"
            yield f"arguments_{index}: {_json(json.loads(tool.parameters))}"
            return
        arguments = list(argument_schemas(tool))
        names = [f"argument_{index}_{number}" for number in range(len(arguments))]
        named = list(zip(names, arguments, strict=True))
        if form.pairs:
            members = " ".join(name if each.required else f"{name}?" for name, each in named)
            yield f"{head} {members} {self._literal(form.pairs.end)}"
        else:
            required = [name for name, each in named if each.required]
            optional = [name for name, each in named if not each.required]
            yield f'{head} "{{" {_members(required, optional)} "}}"'
        for name, each in named:
            pair = self._pair(form.pairs, name, each) if form.pairs else self._member(name, each)
            yield from pair

    def _pair(self, pairs: Pairs, name: str, argument: Argument) -> Iterator[str]:
        schema = argument.schema
        head = f"{self._literal(pairs.key)} {_text(argument.key)} {self._literal(pairs.key_end)}"
        if is_text(schema):
            yield f"{name}: {head} {name}_text"
            yield from self._string(f"{name}_text", schema, pairs.value, pairs.value_end)
        else:
            begin, end = self._literal(pairs.value), self._literal(pairs.value_end)
            yield f"{name}: {head} {begin} {name}_value {end}"
            yield f"{name}_value: {_json(schema)}"

    def _member(self, name: str, argument: Argument) -> Iterator[str]:
        schema, quote = argument.schema, self._form.quote
        yield f"{name}: {_text(argument.key + ':')} {name}_value"
        if is_scalar(schema):
            yield f"{name}_value: {_json(schema)}"
        elif is_text(schema):
            yield from self._string(f"{name}_value", schema, quote, quote)
        else:
            yield f"{name}_value: loose"

    def _string(self, name: str, schema: Schema, begin: str, end: str) -> Iterator[str]:
        """Yields rules for a text between two markers. Of its schema, only enum and lengths are
        enforced."""
        around = f"{self._literal(begin)} {{}} {self._literal(end)}"
        choices, most = schema.get("enum"), schema.get("maxLength")
        least = schema.get("minLength", 0)
        if isinstance(choices, list) and choices:
            texts = [each if isinstance(each, str) else json.dumps(each) for each in choices]
            yield f"{name}: {around.format('(' + ' | '.join(map(_text, texts)) + ')')}"
        elif type(most) is type(least) is int and 0 <= least <= most <= MAX_COUNTED:
            yield f"{name}: {around.format(f'{name}_counted')}"
            yield f"{name}_counted: /(.|\\n){{{least},{most}}}/"
        else:
            yield from self._until_end(name, begin, end)

    def _until_end(self, name: str, begin: str, end: str) -> Iterator[str]:
        """Yields rules for any text up to the marker at its end."""
        head = f"{name}: {self._literal(begin)}"
        if any(self._special_id(marker) is not None for marker in MARKER.findall(end)):
            yield f"{head} {name}_rest {self._literal(end)}"
            yield f"{name}_rest: /(.|\\n)*/"
        else:
            ending = re.escape(end).replace("\\\n", "\\n").replace("/", "\\/")
            yield f"{head} {name}_rest"
            yield f"{name}_rest[lazy]: /(.|\\n)*{ending}/"

    def _call_schema(self, tools: Sequence[Tool]) -> Schema:
        arguments = self._form.arguments
        calls: list[Schema] = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    arguments: json.loads(tool.parameters),
                },
                "required": ["name", arguments],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _members(required: Sequence[str], optional: Sequence[str]) -> str:
    """Returns Lark for the required names, then any of the optional ones in order, with commas
    between."""
    if required:
        return ' "," '.join(required) + _more(optional)
    firsts = [name + _more(optional[index + 1 :]) for index, name in enumerate(optional)]
    return f"({' | '.join(firsts)})?" if firsts else ""


def _more(optional: Sequence[str]) -> str:
    return "".join(f' ("," {name})?' for name in optional)
