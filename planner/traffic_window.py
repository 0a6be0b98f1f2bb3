"""Keeps the traffic that the planner observes, in buckets of one round each.

The request rate can change quickly, so it covers the last minute. Prompt lengths vary more from
one to the next and their mix changes slowly, so they cover the last five minutes, unless the
prompts of the last minute cost clearly more.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

CLEARLY = 3.0
"""Standard deviations by which recent values must differ to count as a change. With two, there
would be several false alarms an hour, since rounds are short."""

ROUND_SECONDS = 10.0
"""The time between two decisions."""

ROUNDS = 6
PROMPT_ROUNDS = 30
RECENT_ROUNDS = 2
SAMPLES = 32
"""Prompts, from the shortest to the longest, that represent all."""


@dataclass(frozen=True, slots=True)
class Window:
    """The traffic of the last `seconds`."""

    seconds: float = 0.0
    requests: int = 0
    # The end of the window, which shows a change of load sooner.
    recent_seconds: float = 0.0
    recent_requests: int = 0
    # Variance of the number of arrivals, divided by its mean: 1 if they are independent.
    dispersion: float = 1.0
    # Compute seconds of each prompt without cached tokens: of all prompts, or of a sample.
    compute_seconds: Sequence[float] = ()
    # Mean tokens of an answer, and mean pages of a request while it decodes.
    answer_tokens: float = 0.0
    pages: float = 0.0

    @property
    def rate(self) -> float:
        """Requests per second; the recent rate if it is clearly higher."""
        mean = self.requests / self.seconds
        if not self.recent_seconds:
            return mean
        recent = self.recent_requests / self.recent_seconds
        noise = math.sqrt(self.dispersion * mean / self.recent_seconds)
        return recent if recent > mean + CLEARLY * noise else mean


@dataclass(slots=True)
class _Round:
    requests: int = 0
    # Of placed requests.
    compute_seconds: list[float] = field(default_factory=list)
    by_second: Counter[int] = field(default_factory=Counter)
    # Of ended answers.
    answers: int = 0
    tokens: int = 0
    page_tokens: float = 0.0  # pages times the tokens generated while they were held


class TrafficWindow:
    def __init__(self, round_seconds: float = ROUND_SECONDS) -> None:
        self._round_seconds = round_seconds
        self._kept: deque[_Round] = deque([_Round()], maxlen=PROMPT_ROUNDS)

    def arrived(self, now: float, count: int = 1) -> None:
        current = self._kept[-1]
        current.requests += count
        current.by_second[int(now)] += count

    def placed(self, compute_seconds: float) -> None:
        self._kept[-1].compute_seconds.append(compute_seconds)

    def answered(self, answers: int, tokens: int, page_tokens: float) -> None:
        """`page_tokens` is the tokens times the pages held while they were generated."""
        current = self._kept[-1]
        current.answers += answers
        current.tokens += tokens
        current.page_tokens += page_tokens

    def end_round(self) -> Window:
        """Ends the current round and returns the window up to its end."""
        window = self._window()
        self._kept.append(_Round())
        return window

    def _window(self) -> Window:
        rounds = list(self._kept)[-ROUNDS:]
        tokens = sum(one.tokens for one in rounds)
        recent = rounds[-RECENT_ROUNDS:]
        return Window(
            seconds=len(rounds) * self._round_seconds,
            requests=sum(one.requests for one in rounds),
            recent_seconds=len(recent) * self._round_seconds,
            recent_requests=sum(one.requests for one in recent),
            dispersion=self._dispersion(rounds),
            compute_seconds=_sample(self._prompts(rounds)),
            answer_tokens=tokens / max(sum(one.answers for one in rounds), 1),
            pages=sum(one.page_tokens for one in rounds) / max(tokens, 1),
        )

    def _prompts(self, rounds: Sequence[_Round]) -> list[float]:
        """Returns compute seconds of `rounds` if they are clearly higher, else of all rounds."""
        kept, last = _prompts_of(self._kept), _prompts_of(rounds)
        if not last:
            return kept
        mean = sum(kept) / len(kept)
        spread = math.sqrt(sum((each - mean) ** 2 for each in kept) / len(kept) / len(last))
        return last if sum(last) / len(last) > mean + CLEARLY * spread else kept

    def _dispersion(self, rounds: Sequence[_Round]) -> float:
        seconds = max(1, int(len(rounds) * self._round_seconds))
        counts = [count for one in rounds for count in one.by_second.values()]
        mean = sum(counts) / seconds
        if not mean:
            return 1.0
        return max(1.0, (sum(each * each for each in counts) / seconds - mean * mean) / mean)


def _prompts_of(rounds: Iterable[_Round]) -> list[float]:
    return [each for one in rounds for each in one.compute_seconds]


def _sample(compute_seconds: list[float]) -> list[float]:
    ordered = sorted(compute_seconds)
    count = len(ordered)
    if count <= SAMPLES:
        return ordered
    return [ordered[int((place + 0.5) * count / SAMPLES)] for place in range(SAMPLES)]
