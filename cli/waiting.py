"""Waiting for the cluster to become what a command has asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from core.errors import DeadlineExceeded

_POLL_SECONDS = 0.2

Seen = TypeVar("Seen")


def wait_for(look: Callable[[], Seen], lack: Callable[[Seen], str], seconds: float) -> Seen:
    """What is seen once it lacks nothing. Raises DeadlineExceeded with what it still lacks."""
    deadline = time.monotonic() + seconds
    while missing := lack(seen := look()):
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(missing)
        time.sleep(_POLL_SECONDS)
    return seen
