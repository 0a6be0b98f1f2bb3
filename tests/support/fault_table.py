"""What each cell of the fault matrix came to, for the table at the end of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    signal: str
    target: str
    moment: str
    outcomes: tuple[str, ...]  # of each request
    moved: int  # requests that took more than one attempt
    seconds: float  # from the signal to the last request's end


ROWS: list[Row] = []


def render() -> list[str]:
    """The table, and the counts of all cells."""
    lines = ["| signal | to | while | outcome of 4 requests | moved | longest |", "|" + "---|" * 6]
    for row in ROWS:
        outcome = ", ".join(f"{count} {what}" for what, count in Counter(row.outcomes).items())
        lines.append(
            f"| {row.signal} | {row.target} | {row.moment} | {outcome} | {row.moved} |"
            f" {row.seconds:.1f} s |"
        )
    totals = Counter(outcome for row in ROWS for outcome in row.outcomes)
    counts = ", ".join(f"{count} {what}" for what, count in totals.most_common())
    requests = sum(totals.values())
    return [*lines, "", f"{len(ROWS)} cells, {requests} requests: {counts}"]
