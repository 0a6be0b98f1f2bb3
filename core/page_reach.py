"""How far back the windows of attention reach, in pages."""

from __future__ import annotations

from collections.abc import Iterable

Window = int | None
"""A token sees itself and window - 1 tokens before it; None: all tokens before it."""


def windows_of(stated: Iterable[int]) -> tuple[Window, ...]:
    """The windows of the slices that a pool's layout states: 0 for none, nothing for one slice."""
    return tuple(window or None for window in stated) or (None,)


def pages_held(tokens: float, page_size: int, windows: Iterable[Window]) -> float:
    """Pages of a sequence of `tokens` tokens. Slices have these windows, and pages of their own."""
    return sum(min(tokens, window or tokens) for window in windows) / page_size


def first_page(window: Window, tokens: int, page_size: int) -> int:
    """The first page that a query at position `tokens`, or a later one, sees."""
    return 0 if window is None else max(0, tokens - window + 1) // page_size


def first_kept(window: Window, tokens: int, page_size: int) -> int:
    """The first page to keep of a sequence of `tokens` tokens: what the next ones see, and what
    those see that continue after its last full page."""
    return first_page(window, tokens // page_size * page_size, page_size)
