"""The workers that a router knows: one link each, and who can push to whom."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator

from baton.v1 import worker_pb2 as pb
from core.errors import LayoutMismatch, Unavailable
from core.types import Role
from router.link import WorkerLink
from router.policy import DecodeView, Placement, PrefillView, Snapshot, least_loaded


class Roster:
    def __init__(
        self, router_id: str, model: str, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._router_id = router_id
        self._model = model
        self._tell = on_change
        self._links: dict[str, WorkerLink] = {}  # by address
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._agents: dict[str, str] = {}  # the last one seen, by worker

    @property
    def links(self) -> Iterable[WorkerLink]:
        return self._links.values()

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """These workers, and no others, from now on."""
        wanted = set(addresses)
        for address in self._links.keys() - wanted:
            self._tasks.pop(address).cancel()
            del self._links[address]
        for address in wanted - self._links.keys():
            link = WorkerLink(address, self._router_id, self._model, self._on_change)
            self._links[address] = link
            self._tasks[address] = asyncio.create_task(link.run())

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        self.set_addresses(())
        await asyncio.gather(*tasks, return_exceptions=True)

    def attached(self, role: Role) -> Iterator[WorkerLink]:
        """Links of sound workers of a role."""
        return (
            link
            for link in self.links
            if link.role is role and not link.load.fault and not self._namesake(link)
        )

    def find(self, worker_id: str) -> WorkerLink:
        return next(link for link in self.links if link.welcome and link.worker_id == worker_id)

    def snapshot(self) -> Snapshot:
        """What the policy decides on."""
        decode = list(self.attached(Role.DECODE))
        prefill = list(self.attached(Role.PREFILL))
        return Snapshot(
            prefill=[_prefill_view(link, decode) for link in prefill],
            decode=[_decode_view(link) for link in decode],
            mismatches=[
                mismatch
                for link in prefill
                for other in decode
                if (mismatch := link.mismatch(other.agent))
            ],
        )

    async def place(self, seconds: float) -> Placement:
        """A pair for one request; waits up to `seconds` for one to be ready."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._may_become_ready():
                    await self.change()
        return least_loaded(self.snapshot())

    async def change(self) -> None:
        """Returns when a worker has come, gone or been connected."""
        self._changed.clear()
        await self._changed.wait()

    def reconnect(self, prefill: WorkerLink, decode: WorkerLink) -> None:
        """A push between two attached workers failed: have them connect anew."""
        if prefill.welcome and decode.welcome:
            prefill.ask_again(decode.agent)

    @property
    def ready(self) -> bool:
        """Whether a request could be placed now."""
        return self._obstacle() is None

    def _may_become_ready(self) -> bool:
        obstacle = self._obstacle()
        return obstacle is not None and not isinstance(obstacle, LayoutMismatch)

    def _obstacle(self) -> Unavailable | None:
        try:
            least_loaded(self.snapshot())
        except Unavailable as error:
            return error
        return None

    def context_length(self) -> int:
        """The most tokens that any pair can hold; 0 when no worker is attached."""
        return min((link.welcome.context_length for link in self.links if link.welcome), default=0)

    def _on_change(self, link: WorkerLink) -> None:
        self._note_restart(link)
        if link.welcome and link.role is Role.PREFILL:
            self._connect(link, self.attached(Role.DECODE))
        elif link.welcome:
            for prefill in self.attached(Role.PREFILL):
                self._connect(prefill, [link])
        self._changed.set()
        self._tell()

    def fault(self, link: WorkerLink) -> str:
        """Why a worker cannot be used; empty when it can."""
        if self._namesake(link):
            return f"another worker is called {link.worker_id} too"
        mismatches = (link.mismatch(other.agent) for other in self.attached(Role.DECODE))
        return link.fault or link.load.fault or next(filter(None, mismatches), "")

    def _namesake(self, link: WorkerLink) -> bool:
        """Whether an earlier live link is to a worker of the same name."""
        if not link.welcome:
            return False
        named = [each for each in self.links if each.welcome and each.worker_id == link.worker_id]
        return named[0] is not link

    def _note_restart(self, link: WorkerLink) -> None:
        """A worker that is back with another agent: its earlier process can write no more."""
        if not link.welcome or self._namesake(link):
            return
        before = self._agents.get(link.worker_id, link.agent)
        self._agents[link.worker_id] = link.agent
        if before != link.agent:
            for decode in self.attached(Role.DECODE):
                decode.send(pb.RouterMessage(sender_gone=pb.SenderGone(agent=before)))

    def _connect(self, prefill: WorkerLink, decode: Iterable[WorkerLink]) -> None:
        """Has a prefill worker get ready to push, once per process start of the other."""
        for link in decode:
            if link.welcome and link.agent not in prefill.asked:
                prefill.asked.add(link.agent)
                connect = pb.Connect(worker_id=link.worker_id, pool=link.welcome.pool)
                prefill.send(pb.RouterMessage(connect=connect))


def _prefill_view(link: WorkerLink, decode: list[WorkerLink]) -> PrefillView:
    return PrefillView(
        worker_id=link.worker_id,
        pending_tokens=max(link.pending_tokens, link.load.queued_tokens),
        reaches=frozenset(other.worker_id for other in decode if link.reaches(other.agent)),
    )


def _decode_view(link: WorkerLink) -> DecodeView:
    return DecodeView(
        worker_id=link.worker_id,
        requests=max(link.active, link.load.running + link.load.waiting),
        free_pages=link.load.free_pages,
    )
