"""Distributes tests over the processes that share the suite."""

from __future__ import annotations

from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

RAY = ("test_ray", "test_serve", "test_scale")
"""Who looks for a Ray on this machine must find only its own."""


ONCE = ("test_compile", "test_quality", "test_wheel")
"""What their tests share takes long to make."""


class Shares(LoadScopeScheduling):
    """Tests of a file that shares clusters or the like stay together; all others go to a free
    process."""

    def _split_scope(self, nodeid: str) -> str:
        path = Path(nodeid.partition("::")[0])
        if path.parent.name != "cluster" and path.stem not in ONCE:
            return nodeid
        return "ray" if path.stem in RAY else path.stem
