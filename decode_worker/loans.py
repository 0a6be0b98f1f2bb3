"""Cached pages that are being pushed to a prefill worker which fetches them.

    PagesWanted ─▶ lent ─PushEnded─▶ back in the cache
         │
         └─ not here, or too much is lent ─▶ declined

A loan is a lease like any other: what is lent is not evicted. It ends with its
push, and the push with its ticket's time or its write's end.
"""

from __future__ import annotations

from baton.core.types import AttemptKey
from baton.engine.page_pool import Lease, PagePool
from baton.kv_transfer.events import PagesWanted
from baton.kv_transfer.thread import TransferThread

MOST = 16
"""Loans at once."""


class Loans:
    def __init__(self, pool: PagePool, transfer: TransferThread) -> None:
        self._pool = pool
        self._transfer = transfer
        self._loans: dict[AttemptKey, Lease] = {}
        self._overdue: set[AttemptKey] = set()

    @property
    def pages(self) -> set[int]:
        return {page for lease in self._loans.values() for page in lease.pages}

    @property
    def overdue_pages(self) -> set[int]:
        """Pages that a write which was given up has been reading for too long."""
        return {page for key in self._overdue for page in self._loans[key].pages}

    def answer(self, wanted: PagesWanted) -> None:
        lease = self._pool.hold(wanted.page_keys if len(self._loans) < MOST else ())
        if lease.pages:
            self._loans[wanted.key] = lease
            self._transfer.lend(wanted.key, wanted.peer, wanted.ticket, lease.pages)
        else:
            lease.release()
            self._transfer.decline(wanted.key, wanted.ticket)

    def end(self, key: AttemptKey) -> None:
        self._overdue.discard(key)
        if lease := self._loans.pop(key, None):
            lease.release()

    def note_overdue(self, key: AttemptKey) -> None:
        if key in self._loans:
            self._overdue.add(key)
