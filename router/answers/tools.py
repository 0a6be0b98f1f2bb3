"""What is asked about tools, checked."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence

from baton.core.bounds import MAX_STRUCTURE
from baton.core.errors import InvalidRequest
from baton.core.types import ChatPrompt, Tool

MAX_TOOLS = 128
_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")


def with_tools(
    chat: ChatPrompt, tools: Sequence[Tool], *, must_call: bool, tool_name: str, field: str
) -> ChatPrompt:
    """The chat with tools; `field` is what the caller calls them."""
    checked = tuple(_checked(tool, field) for tool in tools)
    names = [tool.name for tool in checked]
    if len(names) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools", field=field)
    if len(names) > len(set(names)):
        raise InvalidRequest("two tools have the same name", field=field)
    if must_call and not names:
        raise InvalidRequest("a tool must be called, and there is none", field=field)
    if tool_name and tool_name not in names:
        raise InvalidRequest(f"there is no tool {tool_name!r} to call", field=field)
    return dataclasses.replace(chat, tools=checked, must_call=must_call, tool_name=tool_name)


def _checked(tool: Tool, field: str) -> Tool:
    if not _NAME.fullmatch(tool.name):
        raise InvalidRequest(
            "a tool's name is 1 to 64 letters, digits, underscores and dashes", field=field
        )
    if len(tool.parameters) > MAX_STRUCTURE:
        raise InvalidRequest(f"the parameters of {tool.name} are too long", field=field)
    try:
        schema = json.loads(tool.parameters or '{"type": "object"}')
    except ValueError:
        schema = None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"the parameters of {tool.name} are no JSON Schema", field=field)
    # Arguments are an object, whatever else is said of them.
    return dataclasses.replace(tool, parameters=json.dumps({"type": "object", **schema}))
