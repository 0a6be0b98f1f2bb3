"""What processes hold: file descriptors, threads and memory; and files that outlive them."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHARED = Path("/dev/shm")
# Beyond what a process of the same kind held before: connections to clients and to restarted
# processes that are still open, threads of pools that grow when they are first used.
MORE_FILES, MORE_THREADS = 24, 12
# Allocators keep what the busiest moment needed.
MORE_MEMORY = 160 << 20
ALLOWED = {"files": MORE_FILES, "threads": MORE_THREADS, "memory": MORE_MEMORY}
# Ray's log monitor has two files open for each process that its session ever started, up to 200.
LOG_MONITOR = "log_monitor.py"
# Samples in which a process still loads its model, and those that show a trend.
STARTING, ENOUGH = 30, 60
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Held:
    title: str
    files: int
    threads: int
    memory: int

    @classmethod
    def by(cls, pid: int, title: str) -> Held:
        root = Path(f"/proc/{pid}")
        memory = int((root / "statm").read_text().split()[1]) * PAGE
        files, threads = (len(list((root / name).iterdir())) for name in ("fd", "task"))
        return cls(title, files, threads, memory)


def measure(processes: dict[int, str]) -> dict[int, Held]:
    """What each process holds, by its id; those that have ended meanwhile are left out."""
    found = {}
    for pid, title in processes.items():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[pid] = Held.by(pid, _kind(title))
    return found


def _kind(title: str) -> str:
    """An actor's title, or the name of a program or of Python's script."""
    if title.startswith("ray::"):
        return title
    names = [Path(each).name for each in title.split(" ")]
    return next((each for each in names if each.endswith(".py")), names[0])


def grown(before: dict[int, Held], after: dict[int, Held]) -> Iterator[str]:
    """Processes that hold clearly more than those of their kind did."""
    for pid, now in after.items():
        kin = [held for held in before.values() if held.title == now.title]
        if not kin:
            continue
        for name, more in ALLOWED.items():
            if (now.title, name) == (LOG_MONITOR, "files"):
                continue
            then, found = max(getattr(held, name) for held in kin), getattr(now, name)
            if found > then + more:
                yield f"{now.title} ({pid}) holds {found:,} {name}, its kind held {then:,}"


def climbs(samples: list[int]) -> int:
    """By how much memory grew from the first half to the second, by their medians, after the
    process had started; 0 where too little is known."""
    warm = samples[STARTING:]
    if len(warm) < ENOUGH:
        return 0
    half = len(warm) // 2
    return max(0, int(statistics.median(warm[half:]) - statistics.median(warm[:half])))


def shared_files() -> set[str]:
    return {path.name for path in SHARED.iterdir()}


def left_in(folder: Path) -> set[str]:
    """Temporary files, but Ray's logs."""
    return {path.name for path in folder.iterdir()} - {"ray"}
