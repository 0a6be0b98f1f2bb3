"""A model's chat template: Jinja that comes with the model and is not trusted.

It runs in Jinja's immutable sandbox, bounded in time and memory, with the names and filters that
transformers gives its templates, so that a chat renders the same. Since a thread cannot be stopped
from outside, a check of the time is compiled into every loop and macro.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from baton.core.errors import InvalidConfig, InvalidRequest
from baton.core.types import ChatPrompt, Message, Tool, ToolCall

MAX_RENDERED = 16_000_000
"""Limit in characters: several times what the longest contexts hold."""

RENDER_SECONDS = 5.0
"""Time limit. Half a million messages take less."""

_LARGEST_POWER = 64
_render_deadline = threading.local()

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


class ChatTemplates:
    """A model's chat templates by name. As in transformers, `tool_use` renders chats with tools and
    `default` all others; a template that is the only one renders any chat."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._names = sorted(sources)
        self.source = _chosen(sources, "default")
        self.source_with_tools = _chosen(sources, "tool_use", "default")
        used = [each for each in (self.source, self.source_with_tools) if each is not None]
        self._compiled = {each: ChatTemplate(each, special_tokens) for each in set(used)}

    def render(self, chat: ChatPrompt) -> str:
        """Raises InvalidRequest without a template for the chat."""
        source = self.source_with_tools if chat.tools else self.source
        if source is not None:
            return self._compiled[source].render(chat)
        if not self._names:
            raise InvalidRequest("this model has no chat template; send plain text", field="chat")
        which = "with tools" if chat.tools else "without tools"
        raise InvalidRequest(
            f"this model has no chat template for chats {which}; its templates are"
            f" {', '.join(self._names)}",
            field="chat",
        )


def _chosen(sources: Mapping[str, str], *names: str) -> str | None:
    if len(sources) == 1:
        return next(iter(sources.values()))
    return next((sources[name] for name in names if name in sources), None)


class ChatTemplate:
    """A compiled chat template. `special_tokens` are names that it may use, such as bos_token, and
    their texts."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _sandbox().from_string(source)
        except TemplateSyntaxError as error:
            raise InvalidConfig(f"the model's chat template is broken: {error}") from error
        self._special_tokens = special_tokens
        # gpt-oss's template calls reasoning "thinking".
        self._reasoning = "thinking" if "message.thinking" in source else "reasoning_content"
        self._in_parts = "type" in source and self._shows_parts_alone()

    def render(self, chat: ChatPrompt) -> str:
        """Renders the chat, up to the end that it asks for: by default, where the assistant's
        answer begins."""
        if chat.end == "continued":
            return self._continued(chat)
        messages = [_message(message, self._reasoning) for message in chat.messages]
        if self._in_parts:
            messages = [each | {"content": _parts(each["content"])} for each in messages]
        return self._render(chat, messages)

    def _render(self, chat: ChatPrompt, messages: list[dict[str, object]]) -> str:
        pieces = self._template.generate(
            {
                **json.loads(chat.template_kwargs),
                **self._special_tokens,
                "messages": messages,
                "tools": [_tool(tool) for tool in chat.tools] or None,
                "documents": None,
                "add_generation_prompt": chat.end == "open",
            }
        )
        _render_deadline.at = time.monotonic() + RENDER_SECONDS
        try:
            return _join(pieces)
        except _TEMPLATE_ERRORS as error:
            # Messages of the template and of Jinja help the caller; Python's do not.
            why = f": {error}" if isinstance(error, TemplateError) else ""
            raise InvalidRequest(
                f"the model's chat template refuses the messages{why}", field="chat.messages"
            ) from error

    def _shows_parts_alone(self) -> bool:
        """True if a template shows a message's text as a list of parts but not as a string, as some
        templates of models that also take images do."""
        mark = secrets.token_hex(16)

        def shows(content: object) -> bool:
            try:
                return mark in self._render(ChatPrompt(()), [{"role": "user", "content": content}])
            except InvalidRequest:
                return False

        return not shows(mark) and shows(_parts(mark))

    def _continued(self, chat: ChatPrompt) -> str:
        """Renders a chat up to the end of the last message's content, without what the template
        closes it with."""
        *others, last = chat.messages
        mark = secrets.token_hex(16)
        marked = dataclasses.replace(last, content=last.content + mark)
        rendered = self.render(dataclasses.replace(chat, messages=(*others, marked), end="closed"))
        text, found, _ = rendered.rpartition(mark)
        if not found:
            raise InvalidRequest(
                "the model's chat template does not show the last message, which cannot be"
                " continued",
                field="chat.messages",
            )
        return text


def _message(message: Message, reasoning: str) -> dict[str, object]:
    """Returns a message with only the keys that are set: templates test which ones exist. gpt-oss's
    refuses thinking together with content and calls."""
    left_out = reasoning == "thinking" and message.content and message.tool_calls
    optional: dict[str, object] = {
        "tool_calls": [_call(call) for call in message.tool_calls],
        reasoning: "" if left_out else message.reasoning,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }
    present = {key: value for key, value in optional.items() if value}
    return {"role": message.role, "content": message.content, **present}


def _parts(content: object) -> list[dict[str, object]]:
    return [{"type": "text", "text": content}]


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


class TemplateSandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def check_time(self) -> None:
        if time.monotonic() > _render_deadline.at:
            raise TemplateError(f"it takes longer than {RENDER_SECONDS:g} seconds")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        found: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for node in found:
            check = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(check, lineno=node.lineno))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses operators whose result would be huge."""
        if operator == "**" and isinstance(right, int) and right > _LARGEST_POWER:
            raise TemplateError("a power is too large")
        if operator == "*" and max(_repeated(left, right), _repeated(right, left)) > MAX_RENDERED:
            raise TemplateError("a repetition is too long")
        return super().call_binop(context, operator, left, right)


def _repeated(sequence: object, times: object) -> int:
    """Returns the length of a repeated sequence; 0 for other operands."""
    is_one = isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int)
    return len(sequence) * times if is_one else 0  # type: ignore[arg-type, operator]


class _GenerationTag(Extension):
    """Renders the body of {% generation %}, which marks an answer for training."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _GuardedNamespace(Namespace):
    """Jinja's namespace without the names that lead to Python's internals."""

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
    """Replaces Jinja's filter, which escapes HTML: no model was trained on that."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
