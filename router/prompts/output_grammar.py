"""From the structure that a caller asks for to a grammar that workers can follow.

Both sides use llguidance: here a grammar is only looked at, so that a fault is
told at once and by name; workers compile it for their tokenizer.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING

from baton.core.bounds import MAX_STRUCTURE
from baton.core.errors import InvalidGrammar, NotServed
from baton.core.types import Structure

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

ANY_OBJECT = Structure("json_schema", '{"type": "object"}')

# JSON on one line. With whitespace as it likes, a model that has nothing to say may write it
# for ever.
ONE_LINE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}

KEPT_GRAMMARS = 256
"""Sound ones that need not be looked at again."""


def grammar_of(structure: Structure) -> str:
    """The structure in llguidance's own words, once it is known to be sound."""
    if len(structure.source) > MAX_STRUCTURE:
        raise _unsound(structure, f"it has more than {MAX_STRUCTURE} characters")
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
        raise _unsound(structure, str(error)) from None
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise _unsound(structure, messages[0].strip())
    return grammar


def behind_thoughts(grammar: str) -> str:
    """The same grammar for an answer that begins within the model's thoughts."""
    start = "start: thoughts /\\n{0,2}/ @answer\nthoughts[lazy]: /(.|\\n)*<\\/think>/"
    return json.dumps({"grammars": [{"lark_grammar": start}, *_parts(grammar, "answer")]})


def either(call: str, answer: str) -> str:
    """A grammar for what follows one of two."""
    start = {"lark_grammar": "start: @call | @structured"}
    return json.dumps({"grammars": [start, *_parts(call, "call"), *_parts(answer, "structured")]})


def _parts(grammar: str, name: str) -> list[dict[str, object]]:
    """What a grammar is made of, its start under a name."""
    # Lark is handed on as it is written, everything else as JSON.
    if grammar[:1] != "{":
        return [{"lark_grammar": grammar, "name": name}]
    first, *others = json.loads(grammar)["grammars"]
    return [{**first, "name": name}, *others]


def _unsound(structure: Structure, fault: str) -> InvalidGrammar:
    field = "grammar" if structure.kind == "lark" else structure.kind
    return InvalidGrammar(f"{field} cannot be used: {fault}", field=field)
