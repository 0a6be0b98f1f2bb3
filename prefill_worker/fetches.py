"""Pages of prompts that are fetched from another worker's cache instead of computed.

    begin ─▶ under way ─Fetched─▶ known to the cache, and free for the prompt to find
                 │
                 └─ failed, too late, not wanted ─▶ leaving: the holder may still write;
                                                    the pages are freed when the transfer
                                                    thread says that none of it can arrive

A prompt whose pages are under way waits for them, and so do those that go on like
it. Whatever goes wrong, it is computed: a fetch never fails a request.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.types import AttemptKey
from baton.engine.page_pool import Lease, PagePool
from baton.kv_transfer.events import Fetched
from baton.kv_transfer.thread import TransferThread
from baton.kv_transfer.ticket import make_ticket
from baton.v1 import worker_pb2 as pb
from baton.worker.metrics import WorkerMetrics


@dataclass(slots=True, eq=False)
class Fetch:
    """One prompt's. Its lease holds the prompt's front: what was here, and what is to come."""

    keys: Sequence[bytes]
    lease: Lease
    began: float
    pages: int = 0  # that came
    seconds: float = 0.0  # how long they took, or were waited for
    under_way: bool = True
    overdue: bool = False  # it has failed, and the holder has not let go of the pages

    @property
    def awaited(self) -> Sequence[bytes]:
        return self.keys[self.lease.found :]

    def used(self, found: int) -> int:
        """How many of the pages that came are among the `found` at the prompt's front."""
        return max(0, min(self.pages, found - self.lease.found))


class Fetches:
    def __init__(self, pool: PagePool, transfer: TransferThread, metrics: WorkerMetrics) -> None:
        self._pool = pool
        self._transfer = transfer
        self._metrics = metrics
        self._fetches: dict[AttemptKey, Fetch] = {}
        # The keys of pages that are under way.
        self.coming: Counter[bytes] = Counter()

    @property
    def any_under_way(self) -> bool:
        return bool(self.coming)

    @property
    def pages(self) -> set[int]:
        return {page for fetch in self._fetches.values() for page in fetch.lease.pages}

    @property
    def overdue_pages(self) -> set[int]:
        """Pages that wait for a holder that should have let go of them."""
        overdue = (fetch.lease for fetch in self._fetches.values() if fetch.overdue)
        return {page for lease in overdue for page in lease.pages[lease.found :]}

    def begin(self, key: AttemptKey, holder: pb.Holder, keys: Sequence[bytes]) -> Fetch | None:
        """Asks for what is not here of the first pages of a prompt with these keys. There must
        be room for them. None when all are here."""
        keys = keys[: holder.pages]
        lease = self._pool.hold(keys)
        fetch = Fetch(keys, lease, time.monotonic())
        if not fetch.awaited:
            lease.release()
            return None
        lease.extend(len(fetch.awaited))
        self._fetches[key] = fetch
        self.coming.update(fetch.awaited)
        self._ask(key, fetch, holder)
        return fetch

    def _ask(self, key: AttemptKey, fetch: Fetch, holder: pb.Holder) -> None:
        pages = fetch.lease.pages[fetch.lease.found :]
        # Who is silent for a lease is not waited for, however much it could save.
        most = self._transfer.lease_seconds
        seconds = holder.seconds if 0 < holder.seconds < most else most
        ticket = make_ticket(
            key,
            agent=self._transfer.pool_address.agent,
            pages=pages,
            expires_after_seconds=seconds,
            lease_seconds=self._transfer.lease_seconds,
            layout=self._transfer.pool_address.layout,
        )
        self._transfer.fetch(key, holder.agent, ticket, pages, fetch.awaited, seconds)

    def arrive(self, event: Fetched) -> None:
        """The pages are what their keys say, whether the prompt is still wanted or not."""
        fetch = self._fetches[event.key]
        if fetch.under_way:
            self._end(fetch)
        fetch.pages, fetch.seconds = event.pages, event.seconds
        fetch.lease.name(fetch.keys[: fetch.lease.found + event.pages])
        self._metrics.fetched(event.pages, event.seconds)
        self.let_go(event.key)

    def fail(self, key: AttemptKey) -> None:
        """Nothing will come that can be used. The pages are kept until they are let go."""
        fetch = self._fetches.get(key)
        if fetch is not None and fetch.under_way:
            self._end(fetch)
            self._metrics.fetch_failed(fetch.seconds)

    def cancel(self, key: AttemptKey) -> None:
        """The prompt is not wanted any more."""
        fetch = self._fetches.get(key)
        if fetch is not None and fetch.under_way:
            self._end(fetch)
            self._transfer.release_reservation(key)

    def let_go(self, key: AttemptKey) -> None:
        """Nothing can reach the pages any more."""
        if fetch := self._fetches.pop(key, None):
            fetch.lease.release()

    def note_overdue(self, key: AttemptKey) -> None:
        if key in self._fetches:
            self._fetches[key].overdue = True

    def _end(self, fetch: Fetch) -> None:
        fetch.under_way = False
        fetch.seconds = time.monotonic() - fetch.began
        for key in fetch.awaited:
            self.coming[key] -= 1
            if not self.coming[key]:
                del self.coming[key]
