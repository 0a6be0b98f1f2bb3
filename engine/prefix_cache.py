"""The index of a pool's prefix cache: which pages hold known contents.

A full page is stored under its key (core/page_keys.py), leased or not. Known pages without
a lease are idle; the longest idle is evicted first, and retained pages after others
(engine/idle_pages.py). A lease returns its pages from the last to the first, and retains pages
from the first on, so what follows a prefix is evicted before the prefix: leaves go first, without
a tree. With a second tier, idle pages that it does not hold are unsaved.

Owned by the pool and its thread.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Container, Iterable, KeysView, Sequence, Set
from operator import eq

from baton.engine.idle_pages import IdlePages


class KeySet(dict[bytes, None]):
    """Keys in the order in which they came."""

    def toggle(self, key: bytes) -> None:
        """Adds a key, or removes it where it is there."""
        if key in self:
            del self[key]
        else:
            self[key] = None

    def drain(self) -> KeySet:
        keys = KeySet(self)
        self.clear()
        return keys


class PrefixCache:
    def __init__(self, most_retained: int = 0) -> None:
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._until: dict[int, float] = {}  # when the retention of a known page ends
        self._idle = IdlePages(most_retained)
        self._unsaved: OrderedDict[int, None] = OrderedDict()  # idle pages, the longest idle first
        self._copied: set[int] = set()  # idle pages that a copy leases; they keep their order
        self.changes = KeySet()  # keys that came or went since the last `drain`
        self.below: Container[bytes] | None = None  # keys in the second tier
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
        """Stores a leased page. False when the key already has another page."""
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
        """Marks an idle page as leased by a copy, which is no use of it."""
        self._unsaved.pop(page, None)
        self._copied.add(page)

    def rest(self, page: int) -> bool:
        """Marks a page as unleased. False when its contents are unknown, so that it is free."""
        self._copied.discard(page)
        if page not in self._keys:
            return False
        self._idle.add(page, self._until.get(page, 0.0) if self._until else 0.0)
        if self.below is not None and self._keys[page] not in self.below:
            self._unsaved[page] = None
        return True

    def touch(self, key: bytes) -> None:
        """Counts the end of a copy's use as use of the key's page."""
        page = self._pages[key]
        self._idle.touch(page, self._until.get(page, 0.0))
        if page in self._unsaved:
            self._unsaved.move_to_end(page)

    def retain(self, keys: Iterable[bytes], seconds: float) -> None:
        """Has known pages count as used for the next `seconds`, unless they do for longer. Pages
        that are idle take their new places with their next use."""
        until = self._idle.clock() + seconds
        for key in keys:
            page = self._pages.get(key)
            if page is not None:
                self._until[page] = max(until, self._until.get(page, 0.0))

    def oldest_unsaved(self, count: int) -> list[tuple[bytes, int]]:
        """Keys and pages of the longest idle."""
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
        """Empty when the index is consistent; else what is wrong."""
        pages = map(self._pages.get, self._keys.values())
        if len(self._pages) != len(self._keys) or not all(map(eq, pages, self._keys)):
            return "a key and its page do not know each other"
        if not self._keys.keys() >= set(self._idle):
            return "an idle page has no key"
        if not (self._unsaved.keys() <= self.idle_pages and self._copied <= set(self._idle)):
            return "a page is to be saved, or being saved, and not idle"
        if not self._until.keys() <= self._keys.keys():
            return "a page is retained without contents"
        return ""
