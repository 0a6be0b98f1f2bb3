"""Cuts an answer before the first stop string, while it streams.

All stop strings share one Aho-Corasick automaton. Its state is the longest end
of the text that could still grow into a stop string; that much is held back,
and nothing else. Each character is looked at once.

The first stop string is the one that starts earliest. A match therefore waits
while an earlier start is still open: with "bc" and "abcd", after "abc" the
next character decides whether the text ends before "bc" or before "abcd". Of
stop strings with the same start, which all cut alike, the longest within the
text at hand is named.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from baton.core.errors import InvalidRequest


class StopStrings:
    """Push text, get back what may be shown. `hit` is the stop string that was found."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.hit: str | None = None
        self._node = _automaton(stops)
        self.idle = not stops  # text passes as it is
        self._held = ""
        # Counts of characters from the start of _held.
        self._scanned = 0
        self._match: tuple[int, str] | None = None  # where the best match starts, and which

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that no stop string can reach any more, and the stop string once it is sure."""
        if self.idle or self.hit:
            return ("" if self.hit else text), self.hit
        self._held += text
        for character in text:
            self._scan(character)
            if self._match and self._open_start > self._match[0]:
                break
        if self._match and self._open_start >= self._match[0]:
            return self._stop(*self._match), self.hit
        return self._release(self._open_start), None

    def flush(self) -> str:
        """What was held back, now that no more text comes; sets `hit` if a match was waiting."""
        if self._match and not self.hit:
            return self._stop(*self._match)
        return self._release(len(self._held))

    @property
    def _open_start(self) -> int:
        """Where the longest unfinished stop string would start."""
        return self._scanned - self._node.depth

    def _scan(self, character: str) -> None:
        self._node = self._node.next(character)
        self._scanned += 1
        if self._node.match:
            start = self._scanned - len(self._node.match)
            if self._match is None or start <= self._match[0]:
                self._match = start, self._node.match

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._scanned -= count
        if self._match:
            self._match = self._match[0] - count, self._match[1]
        return text

    def _stop(self, start: int, stop: str) -> str:
        text, self._held = self._held[:start], ""
        self.hit = stop
        return text


class _Node:
    """A beginning shared by some stop strings."""

    __slots__ = ("children", "depth", "fallback", "match")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.children: dict[str, _Node] = {}
        self.fallback: _Node | None = None  # the longest proper end that is also a beginning
        self.match = ""  # the longest stop string that ends here

    def child(self, character: str) -> _Node:
        return self.children.setdefault(character, _Node(self.depth + 1))

    def next(self, character: str) -> _Node:
        node = self
        while character not in node.children and node.fallback is not None:
            node = node.fallback
        return node.children.get(character, node)


def _automaton(stops: Iterable[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        if not stop:
            raise InvalidRequest("a stop string must not be empty", field="stop")
        node = root
        for character in stop:
            node = node.child(character)
        node.match = stop
    _link_fallbacks(root)
    return root


def _link_fallbacks(root: _Node) -> None:
    """Breadth first, because a node's fallback is always nearer to the root."""
    queue = deque([root])
    while queue:
        node = queue.popleft()
        for character, child in node.children.items():
            child.fallback = node.fallback.next(character) if node.fallback else root
            child.match = child.match or child.fallback.match
            queue.append(child)
