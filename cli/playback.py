"""Reads an answer as it comes, and keeps the time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from baton import Answer, Stream


class Playback:
    """One answer being read. `text` is what has come of it, also after a failure."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._start = time.perf_counter()
        self.text = ""
        self.ttft_seconds = 0.0
        self.total_seconds = 0.0

    def read(self) -> Answer:
        """Reads the answer to its end."""
        for _ in self._pieces():
            pass
        return self._stream.answer

    def print(self) -> Answer:
        """Reads the answer to its end, and shows each piece at once. Whole lines are left."""
        try:
            for piece in self._pieces():
                _write(piece)
        finally:
            if self.text and not self.text.endswith("\n"):
                _write("\n")
        return self._stream.answer

    def _pieces(self) -> Iterator[str]:
        for delta in self._stream:
            self.ttft_seconds = self.ttft_seconds or time.perf_counter() - self._start
            self.text += delta.text
            yield delta.text
        self.total_seconds = time.perf_counter() - self._start

    def summary(self) -> str:
        """How much came how fast, in one line."""
        count = self._stream.answer.usage.completion_tokens
        seconds = self.total_seconds - self.ttft_seconds
        # The first token belongs to prefill; the rate is that of the others.
        rate = f", {(count - 1) / seconds:.1f} tokens/s" if count > 1 and seconds > 0 else ""
        return f"{count} tokens{rate}, first after {self.ttft_seconds * 1000:.0f} ms"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
