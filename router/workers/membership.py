"""The workers that a router knows: one link each, what they hold, and who can push to whom.

member ─▶ link made, tries to attach ─▶ usable …
no longer a member ─▶ leaving: what runs there goes on, nothing new comes,
                      and past a bound its requests go on elsewhere ─▶ dropped
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from baton.core.config import Config
from baton.core.errors import BatonError, InvalidRequest
from baton.core.tls import node_identity
from baton.core.types import Role, Work
from baton.router.placement.cost_model import CostModel
from baton.router.placement.placement import (
    DecodeView,
    FetchPages,
    LocalPrefill,
    Placement,
    PrefillView,
    Snapshot,
    Strategy,
    Suspicion,
)
from baton.router.placement.policy import choose
from baton.router.placement.scorer import earliest_first_token
from baton.router.placement.topology import Topology
from baton.router.workers.ended_agents import EndedAgents
from baton.router.workers.link import WorkerLink
from baton.v1 import worker_pb2 as pb

LEAVING_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class CacheNames:
    """What the names of cached pages are made with."""

    root: bytes
    page_size: int


class Membership:
    def __init__(self, router_id: str, model: str, config: Config) -> None:
        self._router_id = router_id
        self._model = model
        self._config = config.router
        self._drain_seconds = config.drain_seconds
        self._identity = node_identity(config)
        self._strategy = Strategy(config.router.policy)
        self._local = LocalPrefill(config.router.local_prefill)
        self._fetch = FetchPages(config.router.fetch_pages)
        self._links: dict[str, WorkerLink] = {}  # by address
        self._tasks: dict[WorkerLink, asyncio.Task[None]] = {}
        self._listeners: list[Callable[[], None]] = []
        self._agents: dict[str, str] = {}  # the last one seen, by worker
        self._ended = EndedAgents()
        # Made of the links when they are asked for; None after any change.
        self._known_names: dict[str, WorkerLink] | None = None
        self._known_topology: Topology | None = None
        self.costs = CostModel()
        self.placed = 0  # requests, so far
        # When the last pair went, or None while there is one.
        self._without_pair_since: float | None = time.monotonic()
        asyncio.get_running_loop().call_later(self._config.local_prefill_after, self._tell)

    @property
    def links(self) -> Iterable[WorkerLink]:
        """Every member's, and those of members that are leaving."""
        return self._tasks.keys()

    def listen(self, listener: Callable[[], None]) -> None:
        """Has `listener` called whenever a worker has come, gone or changed."""
        self._listeners.append(listener)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition, looked at after every change, holds."""
        changed = asyncio.Event()
        self._listeners.append(changed.set)
        try:
            while not condition():
                changed.clear()
                await changed.wait()
        finally:
            self._listeners.remove(changed.set)

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """These workers, and no others, from now on. What runs elsewhere is not cut off."""
        wanted = set(addresses)
        for address in self._links.keys() - wanted:
            link = self._links.pop(address)
            link.leaving = True
            leaving = asyncio.create_task(self._see_off(link, self._tasks[link]))
            self._tasks[link] = leaving
        for address in wanted - self._links.keys():
            link = WorkerLink(
                address,
                self._router_id,
                self._model,
                self._config,
                self._on_change,
                on_report=lambda link: self._topology.teach_step(link, self.costs),
                on_lost=self._question_others,
                identity=self._identity,
            )
            self._links[address] = link
            self._tasks[link] = asyncio.create_task(link.run())
        self._tell()

    def note_ended(self, agents: Iterable[str]) -> None:
        """The processes of these transport agents have ended, and workers must know."""
        self._ended.add(agents)
        self._ended.tell(self.links)

    async def stop(self) -> None:
        """Ends every link; the workers let go of what this router's requests hold."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._links.clear()
        self._tasks.clear()

    def usable(self, role: Role) -> Iterator[WorkerLink]:
        """Links of workers of a role that new requests may go to."""
        return (
            link
            for link in self.links
            if link.role is role and link.usable and not self._namesake(link)
        )

    def find(self, worker_id: str) -> WorkerLink | None:
        """The worker of that name, if it is attached."""
        return self._names.get(worker_id)

    def named(self, worker_id: str) -> WorkerLink:
        """The same for a name that a person has typed."""
        link = self.find(worker_id)
        if link is None:
            names = ", ".join(sorted(self._names)) or "nobody"
            raise InvalidRequest(
                f"no worker called {worker_id!r} is attached; there is {names}", field="worker_id"
            )
        return link

    @property
    def cache_names(self) -> CacheNames | None:
        """How cached pages are named here; None when no worker has a cache."""
        for link in self.links:
            if link.welcome and link.welcome.cache_root:
                return CacheNames(link.welcome.cache_root, link.welcome.pool.layout.page_size)
        return None

    def choose(self, work: Work, suspicion: Suspicion = Suspicion.NONE) -> Placement | BatonError:
        """Where a request that is so much suspected goes, or why it must wait."""
        return choose(self._snapshot(work, suspicion), one_token=work.tokens_wanted == 1)

    def soonest(self, work: Work) -> float:
        """In how many seconds a request is predicted to have its first token, at best."""
        return earliest_first_token(self._snapshot(work, Suspicion.NONE))

    def _snapshot(self, work: Work, suspicion: Suspicion) -> Snapshot:
        topology = self._topology
        return Snapshot(
            prefill=topology.prefill_views(work, suspicion),
            decode=topology.decode_views(work, suspicion),
            mismatches=topology.mismatches,
            local_prefill=self._may_prefill_locally(),
            local=self._local,
            fetch=self._fetch,
            strategy=self._strategy,
            costs=self.costs.costs,
            turn=self.placed,
            prompt_tokens=len(work.prompt_tokens),
            tokens_wanted=work.tokens_wanted,
            page_size=topology.page_size,
            page_bytes=topology.page_bytes,
        )

    @property
    def prefill_busy_seconds(self) -> float:
        """For how long prefill workers have had something to read, summed over them."""
        return self._topology.prefill_busy_seconds

    @property
    def obstacle(self) -> BatonError | None:
        """Why no request could be placed, if not now then after those before it."""
        if self.has_pair:
            return None
        topology = self._topology
        reaches = topology.reaches
        snapshot = Snapshot(
            [PrefillView(link.worker_id, 0, reaches[link.address]) for link in topology.prefill],
            [DecodeView(link.worker_id, 0, 0) for link in topology.decode],
            topology.mismatches,
            self._may_prefill_locally(),
            self._local,
        )
        found = choose(snapshot)
        return found if isinstance(found, BatonError) else None

    @property
    def does_without_prefill(self) -> bool:
        """Whether decode workers may read prompts themselves when no prefill worker is left."""
        return self._local is not LocalPrefill.NEVER

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._topology.page_size

    def reconnect(self, prefill: WorkerLink, decode: WorkerLink) -> None:
        """A push between two attached workers failed: have them connect anew."""
        if prefill.welcome and decode.welcome:
            prefill.ask_again(decode.agent)

    @property
    def can_place(self) -> bool:
        """Whether a request could be placed, if not now then after those before it."""
        return self.obstacle is None

    @property
    def has_pair(self) -> bool:
        """Whether some prefill worker can push to some decode worker."""
        agents = [link.agent for link in self.usable(Role.DECODE)]
        prefill = self.usable(Role.PREFILL)
        return any(link.reaches(agent) for link in prefill for agent in agents)

    def context_length(self) -> int:
        """The most tokens that any pair can hold; 0 when no worker is attached."""
        return min((link.welcome.context_length for link in self.links if link.welcome), default=0)

    def fault(self, link: WorkerLink) -> str:
        """Why a worker cannot be used; empty when it can."""
        if self._namesake(link):
            return f"another worker is called {link.worker_id} too"
        return link.fault or link.load.fault or link.sick or self._misfit_with_all(link)

    def misfits(self, link: WorkerLink) -> list[tuple[str, str]]:
        """The attached workers of the other role that one can never exchange pages with, and
        why."""
        if link.role is Role.PREFILL:
            found = ((other, link.mismatch(other.agent)) for other in self._attached(Role.DECODE))
        else:
            found = ((other, other.mismatch(link.agent)) for other in self._attached(Role.PREFILL))
        return [(other.worker_id, why) for other, why in found if why]

    def _misfit_with_all(self, link: WorkerLink) -> str:
        """Why a prefill worker can push to nobody; empty when it can, or may yet."""
        if link.role is not Role.PREFILL:
            return ""
        reasons = [link.mismatch(other.agent) for other in self.usable(Role.DECODE)]
        return reasons[0] if reasons and all(reasons) else ""

    def _may_prefill_locally(self) -> bool:
        since = self._without_pair_since
        waited = since is not None and time.monotonic() - since >= self._config.local_prefill_after
        return waited and self.does_without_prefill

    @property
    def _topology(self) -> Topology:
        if self._known_topology is None:
            prefill, decode = self.usable(Role.PREFILL), self.usable(Role.DECODE)
            by_name = attrgetter("worker_id")
            self._known_topology = Topology.of(
                sorted(prefill, key=by_name), sorted(decode, key=by_name)
            )
        return self._known_topology

    @property
    def _names(self) -> dict[str, WorkerLink]:
        """The first attached worker of each name."""
        if self._known_names is None:
            self._known_names = {}
            for link in self.links:
                if link.welcome and not link.leaving:
                    self._known_names.setdefault(link.worker_id, link)
        return self._known_names

    def _forget(self) -> None:
        self._known_names = self._known_topology = None

    async def _see_off(self, link: WorkerLink, running: asyncio.Task[None]) -> None:
        """Keeps a link until nothing of ours runs there; past the bound, moves it elsewhere."""
        deadline = time.monotonic() + self._drain_seconds
        try:
            while link.welcome and link.active:
                await asyncio.sleep(LEAVING_POLL_SECONDS)
                if time.monotonic() >= deadline:
                    link.abandon("it has left the cluster")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            del self._tasks[link]

    def _question_others(self, lost: WorkerLink) -> None:
        for link in self.links:
            if link is not lost:
                link.question()

    def _on_change(self, link: WorkerLink) -> None:
        self._forget()
        self._note_restart(link)
        self._ended.tell(self.links)
        if link.welcome and link.role is Role.PREFILL:
            self._connect(link, self._attached(Role.DECODE))
        elif link.welcome:
            for prefill in self._attached(Role.PREFILL):
                self._connect(prefill, [link])
        self._note_pair()
        self._tell()

    def _note_pair(self) -> None:
        if self.has_pair:
            self._without_pair_since = None
        elif self._without_pair_since is None:
            self._without_pair_since = time.monotonic()
            # Somebody may wait for prefill on decode workers to be allowed.
            loop = asyncio.get_running_loop()
            loop.call_later(self._config.local_prefill_after, self._tell)

    def _tell(self) -> None:
        self._forget()
        for listener in list(self._listeners):
            listener()

    def _attached(self, role: Role) -> Iterator[WorkerLink]:
        return (link for link in self.links if link.role is role and not self._namesake(link))

    def _namesake(self, link: WorkerLink) -> bool:
        """Whether an earlier live link is to a worker of the same name."""
        if not link.welcome or link.leaving:
            return False
        return self.find(link.worker_id) is not link

    def _note_restart(self, link: WorkerLink) -> None:
        """A worker that is back with another agent: its earlier process can write no more."""
        if not link.welcome or link.leaving or self._namesake(link):
            return
        before = self._agents.get(link.worker_id, link.agent)
        self._agents[link.worker_id] = link.agent
        alive = any(other.agent == before for other in self.links)
        if before != link.agent and not alive:
            self._ended.add([before])

    def _connect(self, prefill: WorkerLink, decode: Iterable[WorkerLink]) -> None:
        """Has a prefill worker get ready to push, once per process start of the other."""
        for link in decode:
            if link.welcome and link.agent not in prefill.asked:
                prefill.asked.add(link.agent)
                connect = pb.Connect(worker_id=link.worker_id, pool=link.welcome.pool)
                prefill.send(pb.RouterMessage(connect=connect))
