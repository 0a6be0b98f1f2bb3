"""Leases that outlive their requests."""

from __future__ import annotations

from baton.core.types import AttemptKey
from baton.engine.page_pool import Lease


class HeldLeases:
    """Leases of pages that a peer may still use. The transfer thread reports when each can be
    freed."""

    def __init__(self, *, written: bool) -> None:
        """`written`: peers write to the pages that were not cached; otherwise they read all."""
        self._written = written
        self._leases: dict[AttemptKey, Lease] = {}
        self._overdue: set[AttemptKey] = set()  # held for too long

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._leases

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def pages(self) -> set[int]:
        return {page for lease in self._leases.values() for page in lease.held}

    @property
    def overdue_pages(self) -> set[int]:
        leases = [self._leases[key] for key in self._overdue]
        return {page for each in leases for page in (each.fresh if self._written else each.held)}

    def hold(self, key: AttemptKey, lease: Lease) -> None:
        self._leases[key] = lease

    def mark_overdue(self, key: AttemptKey) -> None:
        if key in self._leases:
            self._overdue.add(key)

    def free(self, key: AttemptKey) -> None:
        """Nothing can reach the pages any more."""
        self._overdue.discard(key)
        if lease := self._leases.pop(key, None):
            lease.release()
