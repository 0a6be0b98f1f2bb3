"""How long each chunk of one prompt took."""

from __future__ import annotations

from baton.v1.timing_pb2 import Chunk

MOST = 32
"""Parts that are told of one prompt. Beyond that neighbours are joined, two and two."""


class Chunks:
    def __init__(self) -> None:
        self._parts: list[Chunk] = []
        self._computed = 0
        self._at = 0.0

    def begin(self, cached_tokens: int, now: float) -> None:
        """The first chunk starts, behind what was cached."""
        self._computed, self._at = cached_tokens, now

    def end(self, computed: int, now: float) -> None:
        """So many tokens of the prompt are computed now."""
        if len(self._parts) == MOST:
            self._join()
        self._parts.append(Chunk(tokens=computed - self._computed, seconds=now - self._at))
        self._computed, self._at = computed, now

    def tell(self) -> list[Chunk]:
        return self._parts

    def _join(self) -> None:
        pairs = zip(self._parts[::2], self._parts[1::2], strict=True)
        self._parts = [
            Chunk(tokens=one.tokens + other.tokens, seconds=one.seconds + other.seconds)
            for one, other in pairs
        ]
