"""The workers that a router knows: one link each, which pairs fit, and which agents have ended.

member ─▶ link made, attaches ─▶ usable …
no longer a member ─▶ leaving: finishes its requests, gets no new ones; after drain_seconds its
                      requests migrate ─▶ dropped
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from baton.core.config import Config
from baton.core.page_keys import PageNaming
from baton.core.process import cancel_all
from baton.core.tls import node_identity
from baton.core.types import Role, Work
from baton.router.requests.verdicts import Losses
from baton.router.workers.host_holds import HostHolds
from baton.router.workers.link import WorkerLink
from baton.v1.worker_pb2 import Verdict

LEAVING_POLL_SECONDS = 0.1
REMEMBERED_AGENTS = 1024
MAX_SOURCES = 16
"""The most workers that a worker is told to ask for an adapter's files."""


class Membership:
    """Keeps a link to every member and notifies listeners of every change."""

    def __init__(
        self, router_id: str, model: str, config: Config, holds: HostHolds | None = None
    ) -> None:
        self._router_id = router_id
        self._model = model
        self._config = config
        self._identity = node_identity(config)
        self._holds = holds or HostHolds()
        self._holds.listen(self.notify)
        self._links: dict[str, WorkerLink] = {}  # by address
        self._tasks: dict[WorkerLink, asyncio.Task[None]] = {}
        self._listeners: list[Callable[[], None]] = []
        self.on_report: Callable[[WorkerLink], None] = lambda link: None  # after every Load
        self._known_names: dict[str, WorkerLink] | None = None  # None after any change
        self._ended_agents = EndedAgents()
        self._losses = Losses()
        self.pairs = WorkerPairs(self)

    @property
    def links(self) -> Iterable[WorkerLink]:
        """The links of all members and of leaving workers."""
        return self._tasks.keys()

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change, in the order of registration."""
        self._listeners.append(listener)

    def notify(self) -> None:
        self._known_names = None
        for listener in list(self._listeners):
            listener()

    async def wait_until(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Returns once the condition, checked after every change, is true, or after `seconds`."""
        changed = asyncio.Event()
        self._listeners.append(changed.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while not condition():
                        changed.clear()
                        await changed.wait()
        finally:
            self._listeners.remove(changed.set)

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Replaces the members. Requests on leaving workers continue."""
        wanted = set(addresses)
        for address in self._links.keys() - wanted:
            link = self._links.pop(address)
            link.leaving = True
            leaving = asyncio.create_task(self._close_when_idle(link, self._tasks[link]))
            self._tasks[link] = leaving
        for address in wanted - self._links.keys():
            link = WorkerLink(
                address,
                self._router_id,
                self._model,
                self._config.router,
                self._link_changed,
                on_report=lambda link: self.on_report(link),
                on_lost=self._link_lost,
                identity=self._identity,
                holds=self._holds,
            )
            self._links[address] = link
            self._tasks[link] = asyncio.create_task(link.run())
        self.notify()

    def note_ended(self, agents: Iterable[str]) -> None:
        """Notifies the workers that the processes of these transport agents have ended."""
        self._ended_agents.add(agents)
        self._ended_agents.announce(self.links)

    def note_verdicts(self, verdicts: Iterable[Verdict]) -> None:
        """Notes verdicts on worker processes, for which requests may wait."""
        self._losses.judge(verdicts)
        self.notify()

    async def stop(self) -> None:
        """Ends every link. The workers then release what this router's requests hold."""
        await cancel_all(*self._tasks.values())
        self._holds.unlisten(self.notify)
        self._links.clear()
        self._tasks.clear()

    def usable(self, role: Role) -> Iterator[WorkerLink]:
        """Yields the links of a role's workers that may get new requests."""
        return (link for link in self.attached(role) if link.usable)

    def faults(self, role: Role) -> list[str]:
        """Names attached workers of a role that fail their health checks, with the check."""
        return [
            f"{link.worker_id} {'failed its canary' if link.canary_error else 'reports a fault'}"
            for link in self.attached(role)
            if link.takes_requests and not link.usable
        ]

    def attached(self, role: Role) -> Iterator[WorkerLink]:
        return (link for link in self.links if link.role is role and not self._is_duplicate(link))

    def find(self, worker_id: str) -> WorkerLink | None:
        return self.names.get(worker_id)

    def with_sources(self, work: Work, links: Iterable[WorkerLink]) -> Work:
        """Returns the work for these workers. If one has not loaded the adapter, the work names
        workers that may have its files, first those that have loaded it."""
        adapter = work.adapter
        if adapter is None or all(adapter.digest in link.load.adapters for link in links):
            return work
        attached = [link for link in self.links if link.welcome]
        attached.sort(key=lambda link: adapter.digest not in link.load.adapters)
        sources = tuple(link.address for link in attached[:MAX_SOURCES])
        return replace(work, adapter=adapter._replace(sources=sources))

    @property
    def page_naming(self) -> PageNaming | None:
        """How pages are named; None if no worker has a prefix cache."""
        for link in self.links:
            if link.welcome and link.welcome.cache_root:
                return PageNaming(link.welcome.cache_root, link.welcome.pool.layout.page_size)
        return None

    @property
    def model_digest(self) -> bytes:
        """Names the workers' model and dtype; empty if they report none or differ."""
        layouts = [link.welcome.pool.layout for link in self.links if link.welcome]
        models = {f"{layout.model} {layout.dtype}" for layout in layouts if layout.model}
        return models.pop().encode() if len(models) == 1 else b""

    def context_length(self) -> int:
        """Returns the most tokens that every pair can hold; 0 if no worker is attached."""
        return min((link.welcome.context_length for link in self.links if link.welcome), default=0)

    @property
    def allows_local_prefill(self) -> bool:
        """True if local prefill may replace the last prefill worker."""
        return self._config.router.local_prefill != "never"

    def fault(self, link: WorkerLink) -> str:
        """Returns why a worker cannot be used; "" if it can."""
        if self._is_duplicate(link):
            return f"another worker has the name {link.worker_id} too"
        return (
            link.fault or link.load.fault or link.canary_error or self.pairs.misfit_with_all(link)
        )

    @property
    def names(self) -> dict[str, WorkerLink]:
        """The attached workers by name; of duplicates the first."""
        if self._known_names is None:
            self._known_names = {}
            for link in self.links:
                if link.welcome and not link.leaving:
                    self._known_names.setdefault(link.worker_id, link)
        return self._known_names

    def _is_duplicate(self, link: WorkerLink) -> bool:
        """True if an earlier link leads to another worker of the same name."""
        if not link.welcome or link.leaving:
            return False
        return self.find(link.worker_id) is not link

    async def _close_when_idle(self, link: WorkerLink, running: asyncio.Task[None]) -> None:
        """Keeps a link while requests run there. Migrates them after drain_seconds."""
        deadline = time.monotonic() + self._config.drain_seconds
        try:
            while link.welcome and link.active:
                await asyncio.sleep(LEAVING_POLL_SECONDS)
                if time.monotonic() >= deadline:
                    link.migrate_requests("it has left the cluster")
        finally:
            await cancel_all(running)
            del self._tasks[link]

    def _link_lost(self, lost: WorkerLink) -> None:
        if lost.loss is not None:
            self._losses.add(lost.loss)
        for link in self.links:
            if link is not lost:
                link.fence()

    def _link_changed(self, link: WorkerLink) -> None:
        self._known_names = None
        if link.welcome:
            self._losses.judge(link.welcome.verdicts)
            if link.reported:
                self._losses.revive(link.welcome.incarnation)
        if link.welcome and not link.leaving and not self._is_duplicate(link):
            self._ended_agents.note_start(link, self.links)
        self._ended_agents.announce(self.links)
        self.pairs.connect(link)
        self.notify()


class WorkerPairs:
    """Connects prefill workers to decode workers, and knows which can push to which."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    @property
    def any_usable(self) -> bool:
        """True if any prefill worker can push to any decode worker."""
        agents = [link.agent for link in self._membership.usable(Role.DECODE)]
        prefill = self._membership.usable(Role.PREFILL)
        return any(link.peers.reaches(agent) for link in prefill for agent in agents)

    def connect(self, link: WorkerLink) -> None:
        """Connects an attached worker with those of the other role, once for each process."""
        if link.welcome:
            for prefill, decode in self._pairs_with(link):
                prefill.connect(decode)

    def reconnect(self, prefill: WorkerLink, decode: WorkerLink) -> None:
        """Connects two attached workers again, after a push between them failed."""
        if prefill.welcome and decode.welcome:
            prefill.disconnect(decode.agent)

    def misfits(self, link: WorkerLink) -> list[tuple[str, str]]:
        """Returns the attached workers of the other role that the worker does not fit, and why."""
        return [
            (decode.worker_id if prefill is link else prefill.worker_id, why)
            for prefill, decode in self._pairs_with(link)
            if (why := prefill.peers.mismatch(decode.agent))
        ]

    def misfit_with_all(self, link: WorkerLink) -> str:
        """Returns why a prefill worker can push to no decode worker; "" if it can or may yet."""
        if link.role is not Role.PREFILL:
            return ""
        decode = self._membership.usable(Role.DECODE)
        reasons = [link.peers.mismatch(other.agent) for other in decode]
        return reasons[0] if reasons and all(reasons) else ""

    def _pairs_with(self, link: WorkerLink) -> list[tuple[WorkerLink, WorkerLink]]:
        """Returns (prefill, decode) with each attached worker of the other role."""
        if link.role is Role.PREFILL:
            return [(link, decode) for decode in self._membership.attached(Role.DECODE)]
        return [(prefill, link) for prefill in self._membership.attached(Role.PREFILL)]


class EndedAgents:
    """The transport agents whose processes have ended.

    Workers are notified of them: they may hold pages that a dead process could still have written
    to, and cannot find out otherwise.
    """

    def __init__(self) -> None:
        self._ended: dict[str, None] = {}  # oldest first
        self._latest: dict[str, str] = {}  # agent by worker name

    def add(self, agents: Iterable[str]) -> None:
        self._ended.update(dict.fromkeys(agents))
        for agent in list(self._ended)[:-REMEMBERED_AGENTS]:
            del self._ended[agent]

    def note_start(self, link: WorkerLink, links: Iterable[WorkerLink]) -> None:
        """Notes an attached worker's agent. If it has changed, the former process has ended."""
        before = self._latest.get(link.worker_id, link.agent)
        self._latest[link.worker_id] = link.agent
        if before != link.agent and not any(other.agent == before for other in links):
            self.add([before])

    def announce(self, links: Iterable[WorkerLink]) -> None:
        for link in links:
            link.announce_ended(self._ended.keys())
