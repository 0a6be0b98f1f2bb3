"""The index of a pool's prefix cache: which pages hold known contents.

A full page is stored under its key (core/page_keys.py), leased or not. Known pages without
a lease are idle; the longest idle is evicted first, and retained pages after others.
A lease returns its pages from the last to the first and retains pages from the first on.
So what follows a prefix is evicted before the prefix: leaves go first, without a tree.
With a second tier, idle pages that it does not hold are unsaved.

Owned by the pool and its thread.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, KeysView, Sequence, Set
from operator import eq

LEAST_OUTDATED = 64
"""With fewer outdated entries, the heap of retained pages is not rebuilt."""


class KeySet(dict[bytes, None]):
    """A set of keys in the order of insertion."""

    def toggle(self, key: bytes) -> None:
        """Adds a key, or removes it if present."""
        if key in self:
            del self[key]
        else:
            self[key] = None

    def drain(self) -> KeySet:
        keys = KeySet(self)
        self.clear()
        return keys


class IdlePages:
    """Known pages without a lease, in the order of eviction: the longest idle first.

    A retained page counts as used until its time is over. Retention only changes the order: if no
    other page is left, retained ones are evicted, those whose time ends first before others. At
    most `most_retained` pages are retained, so that hints do not crowd out all other pages.
    """

    def __init__(self, most_retained: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_retained = most_retained
        self.clock = clock
        self._used: OrderedDict[int, None] = OrderedDict()  # the longest idle first
        # By page: the end of its time, and a number that orders pages of the same end. A heap entry
        # that differs from the page's entry here is outdated.
        self._retained: dict[int, tuple[float, int]] = {}
        self._ends: list[tuple[float, int, int]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._used) + len(self._retained)

    def __contains__(self, page: object) -> bool:
        return page in self._used or page in self._retained

    def __iter__(self) -> Iterator[int]:
        """In no particular order."""
        return itertools.chain(self._used, self._retained)

    def add(self, page: int, until: float) -> None:
        """Adds a page that was used just now, unless present."""
        if not until and not self._retained:  # always, without hints
            self._used.setdefault(page, None)
        elif page not in self:
            self._place(page, until)

    def touch(self, page: int, until: float) -> None:
        """Counts as use of a page, if present."""
        if page in self:
            self.discard(page)
            self._place(page, until)

    def discard(self, page: int) -> None:
        self._used.pop(page, None)
        if self._retained:
            self._retained.pop(page, None)

    def pop(self, count: int, without: Container[int] = ()) -> list[int]:
        """Removes the first `count` in the order of eviction."""
        self._expire()
        pages = list(itertools.islice((p for p in self._used if p not in without), count))
        for page in pages:
            del self._used[page]
        if len(pages) < count:
            pages += self._pop_retained(count - len(pages), without)
        return pages

    def _place(self, page: int, until: float) -> None:
        self._expire()
        if not until or until <= self.clock():
            self._used[page] = None
            return
        self._retained[page] = (until, next(self._numbers))
        heapq.heappush(self._ends, (*self._retained[page], page))
        while len(self._retained) > self._most_retained:
            self._used[self._pop_first()] = None
        if len(self._ends) > 2 * len(self._retained) + LEAST_OUTDATED:
            self._ends = [(*entry, page) for page, entry in self._retained.items()]
            heapq.heapify(self._ends)

    def _expire(self) -> None:
        """Counts retained pages whose time is over as used when it ended."""
        now = self.clock() if self._retained else 0.0
        while self._retained and self._first_end() <= now:
            self._used[self._pop_first()] = None

    def _first_end(self) -> float:
        """Drops outdated entries of the heap and returns the first end."""
        while self._retained.get(self._ends[0][2]) != self._ends[0][:2]:
            heapq.heappop(self._ends)
        return self._ends[0][0]

    def _pop_first(self) -> int:
        self._first_end()
        page = heapq.heappop(self._ends)[2]
        del self._retained[page]
        return page

    def _pop_retained(self, count: int, without: Container[int]) -> list[int]:
        pages: list[int] = []
        kept: dict[int, tuple[float, int]] = {}
        while len(pages) < count and self._retained:
            self._first_end()
            until, number, page = heapq.heappop(self._ends)
            del self._retained[page]
            if page in without:
                kept[page] = (until, number)
            else:
                pages.append(page)
        for page, entry in kept.items():
            self._retained[page] = entry
            heapq.heappush(self._ends, (*entry, page))
        return pages


class PrefixCache:
    def __init__(self, most_retained: int = 0) -> None:
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._until: dict[int, float] = {}  # when the retention of a known page ends
        self._idle = IdlePages(most_retained)
        self._unsaved: OrderedDict[int, None] = OrderedDict()  # idle pages, the longest idle first
        self._copied: set[int] = set()  # idle pages that a copy leases; they keep their order
        self.changes = KeySet()  # keys that came or went since the last `drain`
        self.second_tier: Container[bytes] | None = None  # its keys
        # Totals since the start, in pages.
        self.looked_up = 0
        self.found = 0
        self.evictions = 0
        self.lost = 0  # evicted while unsaved

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: object) -> bool:
        return key in self._pages

    @property
    def idle(self) -> int:
        return len(self._idle) - len(self._copied)

    @property
    def idle_pages(self) -> Set[int]:
        return set(self._idle) - self._copied

    @property
    def unsaved(self) -> int:
        return len(self._unsaved)

    @property
    def known_pages(self) -> KeysView[int]:
        return self._keys.keys()

    @property
    def keys(self) -> KeysView[bytes]:
        """Keys of all known pages, a parent before its children."""
        return self._pages.keys()

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest known prefix of `keys`."""
        pages = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def page_of(self, key: bytes) -> int:
        """The page of a known key."""
        return self._pages[key]

    def key_of(self, page: int) -> bytes | None:
        return self._keys.get(page)

    def store(self, key: bytes, page: int) -> bool:
        """Stores a leased page. Returns False if the key already has another page."""
        if key not in self._pages:
            self._pages[key] = page
            self._keys[page] = key
            self.changes.toggle(key)
        return self._pages[key] == page

    def forget(self, page: int) -> bytes | None:
        """Drops a leased page's contents; returns its key, if it had one."""
        key = self._keys.pop(page, None)
        if key is not None:
            del self._pages[key]
            self._until.pop(page, None)
            self.changes.toggle(key)
        return key

    def wake(self, page: int) -> None:
        """Marks a known page as leased."""
        self._idle.discard(page)
        self._unsaved.pop(page, None)
        self._copied.discard(page)

    def copy(self, page: int) -> None:
        """Marks an idle page as leased by a copy, which does not count as use."""
        self._unsaved.pop(page, None)
        self._copied.add(page)

    def rest(self, page: int) -> bool:
        """Marks a page as unleased. Returns False if its contents are unknown, so that it is
        free."""
        self._copied.discard(page)
        if page not in self._keys:
            return False
        self._idle.add(page, self._until.get(page, 0.0) if self._until else 0.0)
        if self.second_tier is not None and self._keys[page] not in self.second_tier:
            self._unsaved[page] = None
        return True

    def touch(self, key: bytes) -> None:
        """Counts as use of the key's page. Called when a lease returns a copy of it."""
        page = self._pages[key]
        self._idle.touch(page, self._until.get(page, 0.0))
        if page in self._unsaved:
            self._unsaved.move_to_end(page)

    def retain(self, keys: Iterable[bytes], seconds: float) -> None:
        """Counts known pages as used for the next `seconds`, if that is longer than before. Idle
        pages move in the order of eviction with their next use."""
        until = self._idle.clock() + seconds
        for key in keys:
            page = self._pages.get(key)
            if page is not None:
                self._until[page] = max(until, self._until.get(page, 0.0))

    def oldest_unsaved(self, count: int) -> list[tuple[bytes, int]]:
        """Keys and pages of the unsaved pages that are idle longest."""
        return [(self._keys[page], page) for page in itertools.islice(self._unsaved, count)]

    def unsave(self, key: bytes) -> None:
        """Notes that the second tier no longer holds this page."""
        page = self._pages.get(key)
        if page is not None and page in self._idle and page not in self._copied:
            self._unsaved[page] = None

    def evict(self, count: int) -> list[int]:
        """Evicts `count` idle pages and returns them."""
        pages = self._idle.pop(count, without=self._copied)
        before = len(self._unsaved)
        for page in pages:
            self._unsaved.pop(page, None)
            self.forget(page)
        self.evictions += count
        self.lost += before - len(self._unsaved)
        return pages

    def check(self) -> str:
        """Returns what is inconsistent in the index, "" if nothing is."""
        pages = map(self._pages.get, self._keys.values())
        if len(self._pages) != len(self._keys) or not all(map(eq, pages, self._keys)):
            return "a key and its page do not match"
        if not self._keys.keys() >= set(self._idle):
            return "an idle page has no key"
        if not (self._unsaved.keys() <= self.idle_pages and self._copied <= set(self._idle)):
            return "an unsaved page, or one being saved, is not idle"
        if not self._until.keys() <= self._keys.keys():
            return "a page is retained without contents"
        return ""
