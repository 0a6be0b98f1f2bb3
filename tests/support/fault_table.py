"""The outcome of each cell of the fault matrix, printed as a table after the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    signal: str
    target: str
    moment: str
    outcomes: tuple[tuple[str, str], ...]  # of each request: its kind and its outcome
    moved: int  # answers that took more than one attempt
    seconds: float  # from the signal to the last request's end


ROWS: list[Row] = []


def render() -> list[str]:
    """The table, and the counts of all cells."""
    kinds = list(dict.fromkeys(kind for row in ROWS for kind, _ in row.outcomes))
    titles = ["signal", "to", "while", *kinds, "moved", "longest"]
    lines = [_line(titles), "|" + "---|" * len(titles)]
    lines += [_line(_cells(row, kinds)) for row in ROWS]
    totals = Counter(outcome for row in ROWS for _, outcome in row.outcomes)
    requests = sum(totals.values())
    return [*lines, "", f"{len(ROWS)} rows, {requests} requests: {_counts(totals)}"]


def _cells(row: Row, kinds: Iterable[str]) -> list[str]:
    by_kind = [
        _counts(Counter(outcome for which, outcome in row.outcomes if which == kind))
        for kind in kinds
    ]
    return [row.signal, row.target, row.moment, *by_kind, str(row.moved), f"{row.seconds:.1f} s"]


def _counts(outcomes: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in outcomes.most_common())


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
