"""Keeps which lease holds which page. The life of a page:

              acquire, extend                     last release,
    ┌──────┐                  ┌────────┐          contents known  ┌────────┐
    │ FREE │─────────────────▶│ LEASED │─────────────────────────▶│ CACHED │
    └──────┘                  └────────┘◀─────────────────────────└────────┘
        ▲        last release,     │     acquire of the same contents  │
        │       contents unknown   │                                   │
        └──────────────────────────┴───────────────────────────────────┘
                                           evicted: a page is needed, and none is free

A lease has one owner and is released once; a second release raises. A step in flight pins
its leases: pages released meanwhile return when the step has ended.

A page is named once it is full and the step or transfer that filled it has ended; it is
never written again. Others may then lease it to read, and it outlives its leases. Only
cached pages are evicted. engine/prefix_cache.py indexes known contents and orders eviction;
engine/second_tier.py keeps evicted pages. engine/page_groups.py has the pool of a model whose
layers have different windows.

`free` counts pages that can be leased at once: the free and the cached ones.

Only the thread that owns the pool may call it.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from baton.core.errors import Exhausted, Internal
from baton.core.page_keys import KeyChain, salted_root
from baton.engine.free_pages import FreePages
from baton.engine.prefix_cache import PrefixCache

RETAINED_SHARE = 2
"""Hints retain at most one page in RETAINED_SHARE."""

AnyLease = TypeVar("AnyLease", bound="Lease")


class Lease:
    """Pages held by one owner.

    The first `found` were leased for their contents and must not be written; the first
    `named` are complete.
    """

    __slots__ = ("_copies", "_pins", "_pool", "found", "named", "pages", "released")

    def __init__(self, pool: PagePool, pages: list[int], found: int = 0) -> None:
        self._pool = pool
        self.pages = pages
        self.found = self.named = found
        self._copies: dict[int, bytes] = {}  # named pages whose key belongs to another page
        self.released = False
        self._pins = 0

    @property
    def pinned(self) -> bool:
        """True if a step in flight uses the pages."""
        return self._pins > 0

    @property
    def tables(self) -> Sequence[list[int]]:
        """The pages of each slice of the layers, in the order of tokens."""
        return (self.pages,)

    @property
    def entries(self) -> int:
        """The number of entries of all tables."""
        return len(self.pages)

    @property
    def held(self) -> list[int]:
        """All pages, in the order of tokens."""
        return self.pages

    @property
    def fresh(self) -> list[int]:
        """The pages after the found ones."""
        return self.pages[self.found :]

    @property
    def held_before(self) -> int:
        """The number of pages before the fresh ones in the list of a prompt's transfer."""
        return self.found

    def listed(self, start: int, end: int, tokens: int) -> list[int]:
        """Those of the pages `start` to `end` that a transfer of `tokens` tokens lists."""
        return self.pages[start:end]

    def pin(self) -> None:
        self._pins += 1

    def unpin(self) -> None:
        self._pins -= 1
        if self.released and not self.pinned:
            self._pool._give_back(self)

    def extend(self, count: int) -> None:
        """Adds `count` pages at the end, or raises Exhausted and changes nothing."""
        if self.released:
            raise Internal("a released lease cannot grow")
        self.pages.extend(self._pool._allocate(count))

    def missing(self, count: int) -> int:
        """Pages that `cover` would allocate, if positive."""
        return count - len(self.pages)

    def cover(self, count: int) -> None:
        """Grows to at least `count` pages of tokens, or raises Exhausted and changes nothing."""
        self.extend(max(0, self.missing(count)))

    def advance(self, tokens: int) -> None:
        """Returns pages that are out of reach of tokens from position `tokens` on, and of a
        sequence that continues after the last full page."""

    def name(self, keys: Sequence[bytes]) -> None:
        """Marks the first pages, whose keys these are, as complete."""
        for page, key in zip(self.pages[self.named : len(keys)], keys[self.named :], strict=True):
            self._name(page, key)
        self.named = max(self.named, len(keys))

    def _name(self, page: int, key: bytes) -> None:
        if not self._pool.cache.store(key, page):
            self._copies[page] = key

    def retain(self, keys: Sequence[bytes], seconds: float) -> None:
        """Delays the eviction of the first pages, whose keys these are."""
        self._pool.cache.retain(keys, seconds)

    def share_copies(self) -> None:
        """Replaces copies of known pages by these. Only allowed before a step uses the lease."""
        self._pool._share_copies(self)

    def forget(self) -> None:
        """Drops the named pages' contents from all tiers."""
        for page in self.pages[: self.named]:
            self._pool.forget(page)
        self._copies = {}

    def release(self) -> None:
        """Returns all pages, at once or with the last unpin."""
        if self.released:
            raise Internal("a lease was released twice")
        self.released = True
        if not self.pinned:
            self._pool._give_back(self)

    def __len__(self) -> int:
        return len(self.pages)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.released:
            self.release()


class EmptyTier:
    """The interface of a pool's second tier. This one keeps nothing."""

    @property
    def leases(self) -> list[Lease]:
        """Leases of pages being copied."""
        return []

    def __len__(self) -> int:
        """Pages kept."""
        return 0

    def advance(self) -> None:
        """Settles finished copies and starts others. Never waits."""

    def restore_pages(self, keys: Sequence[bytes]) -> int:
        """Starts to restore the pages that follow the known ones; returns how many."""
        return 0

    def is_restoring(self, key: bytes) -> bool:
        return False

    def forget(self, key: bytes) -> None:
        """Drops a page whose contents must not be used again."""

    def check(self) -> str:
        """Returns what is inconsistent in the tier's state, "" if nothing is."""
        return ""


class PagePool:
    """`total` pages, numbered from 0, of `page_size` tokens each."""

    slices = 1  # of the layers; `page_size` tokens take one page of each

    def __init__(self, total: int, page_size: int, root: bytes | None = None) -> None:
        """`root` is the root of page keys; without one nothing is cached."""
        self.total = total
        self.page_size = page_size
        self.root = root
        self.cache = PrefixCache(most_retained=total // RETAINED_SHARE)
        self.second_tier = EmptyTier()
        self._free = FreePages(total)
        self._holders = [0] * total  # leases, by page
        self._leases: set[Lease] = set()
        self._changed = True  # since the last full count of pages

    @property
    def free(self) -> int:
        """Pages that can be leased, including the cached."""
        return len(self._free) + self.cache.idle

    @property
    def leased(self) -> int:
        return self.total - self.free

    @property
    def cached(self) -> int:
        """Unleased pages with known contents."""
        return self.cache.idle

    @property
    def returning(self) -> bool:
        """True if pages return when the steps and copies in flight have ended."""
        return bool(self.second_tier.leases) or any(lease.released for lease in self._leases)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def chain(self, salt: str, adapter: bytes = b"") -> KeyChain:
        """Makes page keys for a request; requests with the same salt and adapter share pages."""
        root = None if self.root is None else salted_root(self.root, salt, adapter)
        return KeyChain(root, self.page_size)

    def longest_context(self, limit: int) -> int:
        """The most tokens of one sequence, up to `limit`."""
        return min(limit, self.total * self.page_size)

    def find(self, keys: Sequence[bytes]) -> int:
        """The number of pages at the front of a sequence that are cached."""
        return len(self.cache.find(keys))

    def extend_hit(self, keys: Sequence[bytes], known: Container[bytes], start: int = 0) -> int:
        """Like `find`, for the keys `known`. The first `start` pages count as found."""
        places = range(start, len(keys))
        return next((place for place in places if keys[place] not in known), len(keys))

    def keys_of_hit(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Keys of all pages that a sequence needs to continue after these."""
        return keys

    def cost(self, count: int, keys: Sequence[bytes] = ()) -> int:
        """Free pages that `acquire` would use: known pages that others lease cost nothing."""
        return self.lease_cost(self.cache.find(keys), count)

    def acquire(self, count: int, keys: Sequence[bytes] = ()) -> Lease:
        """Leases `count` pages for a sequence to compute, or raises Exhausted. Known pages of
        `keys` are shared."""
        self._require(self.cost(count, keys))
        found = self.cache.find(keys)
        self._count_lookup(keys, len(found))
        return self.lease(found, count - len(found))

    def cost_to_receive(self, tokens: int, keys: Sequence[bytes]) -> int:
        """Free pages that `receive` would use."""
        return self.cost(self.pages_for(tokens), keys)

    def receive(self, tokens: int, keys: Sequence[bytes]) -> Lease:
        """Like `acquire`, for a sequence whose first `tokens` tokens another worker computes."""
        return self.acquire(self.pages_for(tokens), keys)

    def growth(self, lease: Lease, tokens: int) -> int:
        """Pages that a lease will still need to compute `tokens` tokens."""
        return 0

    def lease_cost(self, known: Sequence[int], count: int) -> int:
        """Free pages of a lease of `count` pages, the first of which are known."""
        return count - sum(self._holders[page] > 0 for page in known)

    def lease(self, known: list[int], more: int = 0) -> Lease:
        """A lease of known pages to read, and of `more` free pages after them."""
        for page in known:
            self._hold(page)
        return self._add_lease(Lease(self, known + self._allocate(more), len(known)))

    def _count_lookup(self, keys: Sequence[bytes], found: int) -> None:
        self.cache.looked_up += len(keys)
        self.cache.found += found

    def hold(self, keys: Sequence[bytes]) -> Lease:
        """A lease of the known prefix of `keys` for a transfer; not counted as a cache lookup."""
        return self.lease(self.cache.find(keys))

    def lease_idle(self, pages: list[int]) -> Lease:
        """A lease of idle pages for a copy; their order of eviction does not change."""
        for page in pages:
            self.cache.copy(page)
            self._holders[page] += 1
        self._changed = True
        return self._add_lease(Lease(self, pages, len(pages)))

    def return_pages(self, lease: Lease, pages: Iterable[int]) -> None:
        """Returns some of a lease's pages: to the cache, or to the free ones."""
        freed = []
        for page in pages:
            key = lease._copies.pop(page, None)
            if key is not None and not self.cache.store(key, page):
                self.cache.touch(key)
            self._holders[page] -= 1
            if not self._holders[page] and not self.cache.rest(page):
                freed.append(page)
        self._free.add(freed)
        self._changed = True

    def forget(self, page: int) -> None:
        """Drops a leased page's contents from all tiers."""
        key = self.cache.forget(page)
        if key is not None:
            self.second_tier.forget(key)

    def check_integrity(self, held: int | None = None) -> str:
        """Returns "" if every page is free, cached, or held by as many leases as it counts, else
        what is wrong.

        `held` is the number of pages that the owner holds, without those of second-tier copies.
        """
        leased = self._leased_by_owner() if held is not None else 0
        if held is not None and held != leased:
            return f"{leased} pages are leased, but the owner holds {held}"
        if not self._changed:
            return ""
        problem = self._count_pages() or self.cache.check() or self.second_tier.check()
        self._changed = bool(problem)
        return problem

    def _leased_by_owner(self) -> int:
        copied = self.second_tier.leases
        if not copied:
            return self.leased
        leases = self._leases.difference(copied)
        return len({page for lease in leases for page in lease.held})

    def _count_pages(self) -> str:
        unleased = self._occurrences(itertools.chain(self._free, self.cache.idle_pages))
        held = self._occurrences(page for lease in self._leases for page in lease.held)
        (wrong,) = np.nonzero((held != self._holders) | (unleased != (held == 0)))
        if len(wrong):
            return f"{len(wrong)} of {self.total} pages are lost or held twice, first {wrong[0]}"
        if not self.cache.known_pages.isdisjoint(self._free):
            return "a free page counts as known"
        return ""

    def _occurrences(self, pages: Iterable[int]) -> npt.NDArray[np.int64]:
        return np.bincount(np.fromiter(pages, np.int64), minlength=self.total)

    def _add_lease(self, lease: AnyLease) -> AnyLease:
        self._leases.add(lease)
        return lease

    def _hold(self, page: int) -> None:
        self.cache.wake(page)
        self._holders[page] += 1
        self._changed = True

    def _require(self, count: int) -> None:
        if count > self.free:
            raise Exhausted(f"{count} pages requested, {self.free} of {self.total} free")

    def _allocate(self, count: int) -> list[int]:
        self._require(count)
        if count > len(self._free):
            self._free.add(self.cache.evict(count - len(self._free)))
        pages = self._free.allocate(count)
        for page in pages:
            self._holders[page] = 1
        self._changed = True
        return pages

    def _give_back(self, lease: Lease) -> None:
        self._leases.remove(lease)
        # Backwards, so that the cache keeps a prefix longer than what follows it.
        self.return_pages(lease, reversed(lease.held))

    def _share_copies(self, lease: Lease) -> None:
        for table in lease.tables:
            for place, page in enumerate(table):
                if page in lease._copies:
                    table[place] = self.cache.page_of(lease._copies[page])
                    self._hold(table[place])
                    self._holders[page] = 0
        self._free.add(lease._copies)
        lease._copies = {}
