"""Measures how long something takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def median_seconds(action: Callable[[], object], repeats: int) -> float:
    def timed() -> float:
        began = time.perf_counter()
        action()
        return time.perf_counter() - began

    return statistics.median(timed() for _ in range(repeats))
