"""The process that checks structures for a router (router/prompts/grammar_checks.py).

Reads a line of JSON, [kind, source], and answers with one: the grammar in llguidance's form and "",
or "" and what is wrong. Ends at the end of its input.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# JSON on one line: with free white space, some models generate white space without end.
ONE_LINE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}

STACK_BYTES = 4 * 2**20
"""Half of what a thread has by default: what fits here also fits in a worker."""

MEMORY_BYTES = 4 * 2**30


def check(kind: str, source: str) -> tuple[str, str]:
    """Returns the grammar and what is wrong with it; one of them is empty."""
    from llguidance import LLMatcher

    try:
        match kind:
            case "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(source, overrides=ONE_LINE)
            case "regex":
                grammar = LLMatcher.grammar_from_regex(source)
            case _:
                grammar = LLMatcher.grammar_from_lark(source)
    except ValueError as error:
        return "", str(error)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return ("", messages[0].strip() or "it is invalid") if is_error else (grammar, "")


def _answer_all() -> None:
    for line in sys.stdin.buffer:
        answer = json.dumps(check(*json.loads(line)))
        sys.stdout.buffer.write(answer.encode() + b"\n")
        sys.stdout.buffer.flush()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY or most > MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_answer_all)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
