"""Recovery times: collected while tests run, printed at the end."""

from __future__ import annotations

from steady_load import SteadyLoad

ROWS: list[str] = []

HEADER = ["| what happens under load | back after | answers | moved | longest pause |"]
HEADER += ["|---|---|---|---|---|"]


def note(what: str, seconds: float, load: SteadyLoad) -> None:
    """`seconds` is from the event until the cluster is whole again."""
    ROWS.append(
        f"| {what} | {seconds:.1f} s | {load.answers} | {load.moved} | {load.longest:.1f} s |"
    )


def render() -> list[str]:
    return HEADER + ROWS
