"""A router under a profiler: SIGUSR1 begins a profile, SIGUSR2 ends it and writes it to a file.

python -m bench.profiled_router FILE --config CONFIG
"""

from __future__ import annotations

import cProfile
import runpy
import signal
import sys


def main() -> None:
    path = sys.argv.pop(1)
    profile = cProfile.Profile()

    def begin(number: int, frame: object) -> None:
        profile.clear()
        profile.enable()

    def end(number: int, frame: object) -> None:
        profile.disable()
        profile.dump_stats(path)

    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
    runpy.run_module("baton.router", run_name="__main__")


if __name__ == "__main__":
    main()
