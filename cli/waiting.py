"""Waiting for the cluster to become what a command has asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from baton.cli.edge import note
from baton.core.errors import DeadlineExceeded, Unavailable

_POLL_SECONDS = 0.2

Seen = TypeVar("Seen")


def wait_for(look: Callable[[], Seen], lack: Callable[[Seen], str], seconds: float) -> Seen:
    """What is seen once it lacks nothing. Raises DeadlineExceeded with what it still lacks.

    Whoever cannot be asked for a while, be it a router or the controller, is asked again.
    """
    deadline = time.monotonic() + seconds
    said = ""
    while True:
        try:
            seen = look()
        except Unavailable as error:
            missing = error.message
            if missing != said:
                note(missing)
            said = missing
        else:
            missing, said = lack(seen), ""
            if not missing:
                return seen
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(missing)
        time.sleep(_POLL_SECONDS)
