"""Keeps what the planner observes: the last minute of traffic, in buckets of one round each."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from planner.observation import Window

ROUND_SECONDS = 10.0
"""Between two decisions."""

ROUNDS = 6
RECENT_ROUNDS = 2
SAMPLES = 32
"""Prompts, from the shortest to the longest, that stand for all."""


@dataclass(slots=True)
class _Round:
    requests: int = 0
    # Of those that were placed.
    compute_seconds: list[float] = field(default_factory=list)
    by_second: Counter[int] = field(default_factory=Counter)
    # Over the answers that ended.
    answers: int = 0
    tokens: int = 0
    page_tokens: float = 0.0  # pages, times tokens that were written while they were held


class TrafficWindow:
    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._rounds: deque[_Round] = deque([_Round()], maxlen=ROUNDS)

    def arrived(self, now: float) -> None:
        current = self._rounds[-1]
        current.requests += 1
        current.by_second[int(now)] += 1

    def placed(self, compute_seconds: float) -> None:
        self._rounds[-1].compute_seconds.append(compute_seconds)

    def answered(self, prompt_tokens: int, answer_tokens: int) -> None:
        current = self._rounds[-1]
        current.answers += 1
        current.tokens += answer_tokens
        pages = (prompt_tokens + answer_tokens / 2) / self._page_size
        current.page_tokens += answer_tokens * pages

    def end_round(self) -> Window:
        """The rounds so far, the current one included, which is over."""
        window = self._window()
        self._rounds.append(_Round())
        return window

    def _window(self) -> Window:
        rounds = list(self._rounds)
        compute = sorted(each for one in rounds for each in one.compute_seconds)
        tokens = sum(one.tokens for one in rounds)
        recent = rounds[-RECENT_ROUNDS:]
        return Window(
            seconds=len(rounds) * ROUND_SECONDS,
            requests=sum(one.requests for one in rounds),
            recent_seconds=len(recent) * ROUND_SECONDS,
            recent_requests=sum(one.requests for one in recent),
            dispersion=self._dispersion(),
            compute_seconds=_sample(compute),
            answer_tokens=tokens / max(sum(one.answers for one in rounds), 1),
            pages=sum(one.page_tokens for one in rounds) / max(tokens, 1),
        )

    def _dispersion(self) -> float:
        seconds = int(len(self._rounds) * ROUND_SECONDS)
        counts = [count for one in self._rounds for count in one.by_second.values()]
        mean = sum(counts) / seconds
        if not mean:
            return 1.0
        return max(1.0, (sum(each * each for each in counts) / seconds - mean * mean) / mean)


def _sample(ordered: list[float]) -> list[float]:
    count = len(ordered)
    if count <= SAMPLES:
        return ordered
    return [ordered[int((place + 0.5) * count / SAMPLES)] for place in range(SAMPLES)]
