"""Reads the ledger that a Generate call ends with (router/observe/phases.py packs it)."""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.errors import Internal
from baton.v1 import timing_pb2

KEY = "baton-timing-bin"

Metadata = Iterable[tuple[str, str | bytes]]


def timing_of(trailer: Metadata) -> timing_pb2.RequestTiming:
    """Of a call that has ended well."""
    for key, value in trailer:
        if key == KEY and isinstance(value, bytes):
            return timing_pb2.RequestTiming.FromString(value)
    raise Internal("the call did not end with its timing")
