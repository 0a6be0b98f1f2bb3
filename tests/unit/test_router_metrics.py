"""TokenTimes against the metrics library's own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from baton.core import metrics as names
from baton.router.observe.trends import TokenTimes


def lines(registry: CollectorRegistry) -> set[str]:
    """Without creation times, which ours do not have."""
    text = generate_latest(registry).decode()
    return {line for line in text.splitlines() if "_created" not in line}


def test_token_metrics_equal_the_librarys_own() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    times = TokenTimes()
    ours.register(times)
    gaps = Histogram(
        names.ITL_SECONDS,
        names.HELP[names.ITL_SECONDS],
        buckets=names.LATENCY_BUCKETS,
        registry=theirs,
    )
    tokens = Counter(names.GENERATION_TOKENS, names.HELP[names.GENERATION_TOKENS], registry=theirs)
    times.add_first(2, now=0.0)
    tokens.inc(2)
    on_a_bound, longest = names.LATENCY_BUCKETS[3], names.LATENCY_BUCKETS[-1]
    for count, gap in ((1, 0.0), (3, on_a_bound), (2, 2 * longest)):
        times.add(count, gap, now=0.0)
        tokens.inc(count)
        for _ in range(count):
            gaps.observe(gap)
    assert lines(ours) == lines(theirs)
