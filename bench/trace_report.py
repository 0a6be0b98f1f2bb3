"""Summaries of a run's outcomes, and their tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.core.metrics import Spread
from bench.trace_replay import Outcome

KV_AWARE = "kv_aware"
ENOUGH_HITS = 0.95
"""The share of an infinite cache's hits that is required."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The limits of a good answer in seconds: TTFT and mean ITL."""

    ttft: float
    itl: float

    def is_met(self, outcome: Outcome) -> bool:
        return self.ttft_is_met(outcome) and self.itl_is_met(outcome)

    def ttft_is_met(self, outcome: Outcome) -> bool:
        return not outcome.error and outcome.ttft <= self.ttft

    def itl_is_met(self, outcome: Outcome) -> bool:
        gaps = outcome.gaps
        return not outcome.error and sum(gaps) <= self.itl * len(gaps)


@dataclass(frozen=True, slots=True)
class Summary:
    """One run."""

    requests: int
    errors: Counter[str]
    prompt_tokens: int
    cached_tokens: int  # prompt tokens that were not computed
    decode_cached_tokens: int | None  # prompt tokens that were not transferred, if known
    local: int  # prompts that the decode worker prefilled
    reasons: Counter[str]
    ttft: Spread
    itl: Spread
    good: int
    seconds: float  # while requests arrived

    @property
    def hit_rate(self) -> float:
        return _share(self.cached_tokens, self.prompt_tokens)

    @property
    def goodput(self) -> float:
        """Good answers per second of arrivals, so that equal arrivals compare exactly."""
        return self.good / self.seconds


def summarize(
    outcomes: Sequence[Outcome],
    objective: Objective,
    seconds: float,
    decode_cached_tokens: int | None = None,
) -> Summary:
    """Summarizes a run in which requests arrived for `seconds`."""
    answered = [outcome for outcome in outcomes if not outcome.error]
    return Summary(
        requests=len(outcomes),
        errors=Counter(outcome.error for outcome in outcomes if outcome.error),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in answered),
        cached_tokens=sum(outcome.cached_tokens for outcome in answered),
        decode_cached_tokens=decode_cached_tokens,
        local=sum(outcome.local for outcome in answered),
        reasons=Counter(outcome.reason_code for outcome in answered),
        ttft=Spread.of([outcome.ttft for outcome in answered]),
        itl=Spread.of([gap for outcome in answered for gap in outcome.gaps]),
        good=sum(objective.is_met(outcome) for outcome in outcomes),
        seconds=seconds,
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the cache index was worth it, in one run of all policies."""

    share_of_infinite: float  # kv_aware's hit rate, as a share of one infinite cache's
    ttft: float  # kv_aware's mean
    best_other_ttft: float  # the best mean of the other policies

    @classmethod
    def of(cls, summaries: Mapping[str, Summary], infinite_rate: float) -> Verdict:
        aware = summaries[KV_AWARE]
        others = [each.ttft.mean for name, each in summaries.items() if name != KV_AWARE]
        return cls(_share(aware.hit_rate, infinite_rate), aware.ttft.mean, min(others))

    @property
    def hits_enough(self) -> bool:
        return self.share_of_infinite >= ENOUGH_HITS

    @property
    def is_fastest(self) -> bool:
        return self.ttft < self.best_other_ttft

    @property
    def holds(self) -> bool:
        return self.hits_enough and self.is_fastest

    def __str__(self) -> str:
        hits, times = ("yes" if each else "NO" for each in (self.hits_enough, self.is_fastest))
        return (
            f"{self.share_of_infinite:.1%} of an infinite cache's hits, at least"
            f" {ENOUGH_HITS:.0%}: {hits}; mean TTFT {self.ttft * 1e3:,.0f} ms, the best of the"
            f" others {self.best_other_ttft * 1e3:,.0f} ms, less: {times}"
        )


def print_summaries(summaries: Mapping[str, Summary], infinite_rate: float) -> None:
    """Prints a table with one column per policy."""
    columns = [_cells(summary, infinite_rate) for summary in summaries.values()]
    print(f"{'':<34}" + "".join(f"{name:>16}" for name in summaries))
    for row in zip(*(column.items() for column in columns), strict=True):
        title = row[0][0]
        print(f"{title:<34}" + "".join(f"{cell:>16}" for _, cell in row), flush=True)
    for name, summary in summaries.items():
        reasons = ", ".join(f"{count} {reason}" for reason, count in summary.reasons.most_common())
        print(f"{name} placed {reasons}")
        for error, count in summary.errors.most_common():
            print(f"{name} failed {count} times: {error}")


def _cells(summary: Summary, infinite_rate: float) -> dict[str, str]:
    held = summary.decode_cached_tokens
    decode_rate = "-" if held is None else f"{_share(held, summary.prompt_tokens):.1%}"
    return {
        "requests": f"{summary.requests}",
        "errors": f"{summary.errors.total()}",
        "hit rate (not computed)": f"{summary.hit_rate:.1%}",
        "  of one infinite cache's": f"{_share(summary.hit_rate, infinite_rate):.1%}",
        "hit rate on decode (not moved)": decode_rate,
        "prompts computed by decode": f"{_share(summary.local, summary.requests):.1%}",
        **_spread_cells("TTFT", summary.ttft),
        **_spread_cells("ITL", summary.itl),
        "within the objective": f"{_share(summary.good, summary.requests):.1%}",
        "goodput, requests/s": f"{summary.goodput:.2f}",
    }


def _spread_cells(title: str, spread: Spread) -> dict[str, str]:
    values = {"mean": spread.mean, "p50": spread.p50, "p90": spread.p90, "p99": spread.p99}
    return {f"{title} {name}, ms": f"{value * 1e3:,.0f}" for name, value in values.items()}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
