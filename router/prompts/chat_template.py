"""A model's chat template: Jinja that comes with the model and is not trusted.

It runs in a sandbox, with the names and filters that transformers gives its
templates, so that a conversation reads the same here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from baton.core.errors import InvalidConfig, InvalidRequest
from baton.core.types import Message, Tool, ToolCall
from baton.router.prompts.template_sandbox import MAX_RENDERED, TemplateSandbox

# What an expression inside a template can raise besides Jinja's own errors.
_TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """`special_tokens` are the names a template may use, such as bos_token, and their text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._sandbox = _sandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except TemplateSyntaxError as error:
            raise InvalidConfig(f"the model's chat template is broken: {error}") from error
        self._special_tokens = special_tokens

    def render(self, messages: Iterable[Message], tools: Sequence[Tool] = ()) -> str:
        """The conversation as text that ends where the assistant's answer begins."""
        pieces = self._template.generate(
            **self._special_tokens,
            messages=[_message(message) for message in messages],
            tools=[_tool(tool) for tool in tools] or None,
            documents=None,
            add_generation_prompt=True,
        )
        try:
            with self._sandbox.limited():
                return _join(pieces)
        except _TEMPLATE_ERRORS as error:
            # Its own words, and Jinja's; Python's would be about us.
            why = f": {error}" if isinstance(error, TemplateError) else ""
            raise InvalidRequest(
                f"the model's chat template refuses the messages{why}", field="chat.messages"
            ) from error


def _message(message: Message) -> dict[str, object]:
    """What templates look at, and only what is there: they ask which keys there are."""
    told: dict[str, object] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        told["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.reasoning:
        told["reasoning_content"] = message.reasoning
    if message.tool_call_id:
        told["tool_call_id"] = message.tool_call_id
    if message.name:
        told["name"] = message.name
    return told


def _call(call: ToolCall) -> dict[str, object]:
    # Templates write arguments as JSON themselves.
    function = {"name": call.name, "arguments": _from_json(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool: Tool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name, "description": tool.description}
    return {"type": "function", "function": {**function, "parameters": json.loads(tool.parameters)}}


def _from_json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _join(pieces: Iterable[str]) -> str:
    kept: list[str] = []
    room = MAX_RENDERED
    for piece in pieces:
        room -= len(piece)
        if room < 0:
            raise InvalidRequest(
                f"the rendered chat has more than {MAX_RENDERED} characters", field="chat.messages"
            )
        kept.append(piece)
    return "".join(kept)


def _sandbox() -> TemplateSandbox:
    made = TemplateSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    made.globals["namespace"] = _GuardedNamespace
    return made


class _GenerationTag(Extension):
    """{% generation %} marks an answer for training. Here its body is all that matters."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _GuardedNamespace(Namespace):
    """Jinja's namespace, less the names through which Python's internals can be reached."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
