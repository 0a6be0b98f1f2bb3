"""Where chat templates run: Jinja's immutable sandbox, with bounds on time and on memory.

A thread cannot be stopped from outside. So every turn of a loop, and every call of a macro, looks
at the clock: that is written into the template when it is compiled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED = 16_000_000
"""Characters. Several times what the longest contexts hold."""

RENDER_SECONDS = 5.0
"""Half a million messages take less."""

_LARGEST_POWER = 64
_clock = threading.local()


class TemplateSandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    @contextmanager
    def limited(self) -> Iterator[None]:
        """While a template renders, on this thread."""
        _clock.end = time.monotonic() + RENDER_SECONDS
        yield

    def look(self) -> None:
        if time.monotonic() > _clock.end:
            raise TemplateError(f"it takes longer than {RENDER_SECONDS:g} seconds")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        found: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for node in found:
            look = nodes.Call(nodes.EnvironmentAttribute("look"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(look, lineno=node.lineno))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """What makes much of little, at once."""
        if operator == "**" and isinstance(right, int) and right > _LARGEST_POWER:
            raise TemplateError("a power is too large")
        if operator == "*" and max(_repeated(left, right), _repeated(right, left)) > MAX_RENDERED:
            raise TemplateError("a repetition is too long")
        return super().call_binop(context, operator, left, right)


def _repeated(sequence: object, times: object) -> int:
    """How long it is, if that is what it is."""
    is_one = isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int)
    return len(sequence) * times if is_one else 0  # type: ignore[arg-type, operator]
