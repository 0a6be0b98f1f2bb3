"""How fast decode workers are where all workers share the cores of one machine.

The kernel gives each thread that wants to run a part by its weight, and nobody more than a core.
A decode worker stands back for the others (decode.nice), so beside as many busy prefill workers
as there are cores it all but stops, and with one less it runs at full speed: what prefill takes
from it is no even share of each step. Workers are taken to have one thread.
"""

from __future__ import annotations

from dataclasses import dataclass

NICE_STEP = 1.25
"""By how many times a thread has less weight that is one nicer: the kernel's table."""


def weight(niceness: int) -> float:
    """Of a thread, where one that is not nice has 1."""
    return NICE_STEP**-niceness


@dataclass(frozen=True, slots=True)
class SharedCores:
    # 0 where every worker has hardware of its own.
    count: int
    decode_weight: float

    def decode_speed(self, prefill: int, decode: int) -> float:
        """Of a decode worker, as a share of its speed alone, with so many of each at work."""
        if not self.count or prefill + decode <= self.count:
            return 1.0
        wanted = prefill + self.decode_weight * decode
        if wanted <= self.count:
            # Prefill workers have a core each, decode workers what is left.
            return (self.count - prefill) / decode
        return self.decode_weight * self.count / wanted
