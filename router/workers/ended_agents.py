"""Which workers' processes have ended, and who has been told.

A worker must hear of it, since it may hold pages that the dead process could
write to and have no other way to find out. One whose stream broke is told again
when it is back.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.router.workers.link import WorkerLink
from baton.v1 import worker_pb2 as pb

REMEMBERED = 1024


class EndedAgents:
    def __init__(self) -> None:
        self._ended: dict[str, None] = {}  # transport agents, oldest first
        self._told: dict[WorkerLink, tuple[pb.Welcome, set[str]]] = {}

    def add(self, agents: Iterable[str]) -> None:
        """These agents' processes have ended."""
        self._ended.update(dict.fromkeys(agents))
        for agent in list(self._ended)[:-REMEMBERED]:
            del self._ended[agent]

    def tell(self, links: Iterable[WorkerLink]) -> None:
        """Tells each worker what it was not told yet on its stream. `links` are all."""
        told: dict[WorkerLink, tuple[pb.Welcome, set[str]]] = {}
        for link in links:
            if link.welcome is None:
                continue
            stream, known = self._told.get(link, (None, set()))
            news = self._ended.keys() - (known if stream is link.welcome else set())
            for agent in news:
                link.send(pb.RouterMessage(sender_gone=pb.SenderGone(agent=agent)))
            told[link] = (link.welcome, set(self._ended))
        self._told = told
