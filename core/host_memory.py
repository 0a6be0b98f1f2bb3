"""How much memory this process can still take, and its control group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


def available_bytes() -> int:
    """Free memory and the page cache, which Linux gives back: of the machine, or of the control
    groups around this process if they leave less."""
    fields = _numbers(Path("/proc/meminfo"), separator=":")
    return min([fields["MemAvailable"] << 10, *_left_by_groups()])


def _left_by_groups() -> Iterator[int]:
    """What each control group that has a limit still allows."""
    group = own_group()
    for each in (group, *group.parents):
        if each.is_relative_to(_CGROUPS):
            with contextlib.suppress(OSError, ValueError):  # "max": no limit
                yield _left_by(each)


def own_group() -> Path:
    """The folder of this process's control group, or of all if that is unknown."""
    with contextlib.suppress(OSError):
        return _CGROUPS / _OWN_GROUP.read_text().partition("::/")[2].strip()
    return _CGROUPS


def _left_by(group: Path) -> int:
    limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
    fields = _numbers(group / "memory.stat")
    return limit - used + fields["inactive_file"] + fields["active_file"]


def _numbers(path: Path, separator: str | None = None) -> dict[str, int]:
    """The first number of each line, by name."""
    lines = (line.split(separator, 1) for line in path.read_text().splitlines())
    return {name: int(rest.split()[0]) for name, rest in lines}
