"""Turns the structure that a request asks for into a grammar that workers follow.

Both sides use llguidance: the router only validates a grammar, so that an error is reported at
once and by name; workers compile it for their tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from baton.core.bounds import MAX_STRUCTURE
from baton.core.errors import InvalidGrammar, NotServed
from baton.core.types import Structure

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

ANY_OBJECT = Structure("json_schema", '{"type": "object"}')

# JSON on one line: with free white space, some models write it without end.
ONE_LINE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}

KEPT_GRAMMARS = 256
"""Validated grammars that are remembered."""


def json_structure(schema: Mapping[str, object] | None) -> Structure:
    """JSON of this JSON Schema; any object where there is none."""
    return ANY_OBJECT if schema is None else Structure("json_schema", json.dumps(schema))


def grammar_of(structure: Structure) -> str:
    """The structure in llguidance's own form. Raises InvalidGrammar when it is not valid."""
    if len(structure.source) > MAX_STRUCTURE:
        raise _invalid(structure, f"it has more than {MAX_STRUCTURE} characters")
    return _checked(structure)


@lru_cache(KEPT_GRAMMARS)
def _checked(structure: Structure) -> str:
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError:
        raise NotServed("structured answers need llguidance, which is not installed") from None
    try:
        match structure.kind:
            case "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(structure.source, overrides=ONE_LINE)
            case "regex":
                grammar = LLMatcher.grammar_from_regex(structure.source)
            case "lark":
                grammar = LLMatcher.grammar_from_lark(structure.source)
    except ValueError as error:
        raise _invalid(structure, str(error)) from None
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise _invalid(structure, messages[0].strip())
    return grammar


def after_reasoning(grammar: str, end: str = "</think>", token: int | None = None) -> str:
    """The grammar for an answer that begins within the model's reasoning, which ends with a mark;
    `token` is the mark's where that is special."""
    escaped = re.escape(end).replace("/", "\\/")
    lazy = f"reasoning[lazy]: /(.|\\n)*{escaped}/"
    rule = lazy if token is None else f"reasoning: /(.|\\n)*/ <[{token}]>"
    return within(f"start: reasoning /\\n{{0,2}}/ @answer\n{rule}", grammar, "answer")


def within(start: str, grammar: str, name: str) -> str:
    """The grammar `start`, in Lark, which refers to `grammar` by `name`."""
    return json.dumps({"grammars": [{"lark_grammar": start}, *_parts(grammar, name)]})


def either(call: str, answer: str) -> str:
    """A grammar for an answer that follows either of two."""
    start = {"lark_grammar": "start: @call | @structured"}
    return json.dumps({"grammars": [start, *_parts(call, "call"), *_parts(answer, "structured")]})


def _parts(grammar: str, name: str) -> list[dict[str, object]]:
    """The grammars that a grammar is made of, its start under a name."""
    # Lark stays as it is written; everything else is JSON.
    if grammar[:1] != "{":
        return [{"lark_grammar": grammar, "name": name}]
    first, *others = json.loads(grammar)["grammars"]
    return [{**first, "name": name}, *others]


def _invalid(structure: Structure, fault: str) -> InvalidGrammar:
    field = "grammar" if structure.kind == "lark" else structure.kind
    return InvalidGrammar(f"{field} cannot be used: {fault}", field=field)
