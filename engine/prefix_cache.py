"""The index of a pool's prefix cache: which pages hold known contents.

A full page is stored under its key (core/page_keys.py), leased or not. Known pages without
a lease are idle; the longest idle is evicted first. A lease returns its pages from the last
to the first, so what follows a prefix is evicted before the prefix: leaves go first, without
a tree. With a second tier, idle pages that it does not hold are unsaved.

Owned by the pool and its thread.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Container, KeysView, Sequence, Set
from operator import eq


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
    def __init__(self) -> None:
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # the longest idle first
        self._unsaved: OrderedDict[int, None] = OrderedDict()  # idle pages, in the same order
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
        return self._idle.keys() - self._copied

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
            self.changes.toggle(key)
        return key

    def wake(self, page: int) -> None:
        """Marks a known page as leased."""
        self._idle.pop(page, None)
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
        self._idle.setdefault(page, None)
        if self.below is not None and self._keys[page] not in self.below:
            self._unsaved[page] = None
        return True

    def touch(self, key: bytes) -> None:
        """Counts the end of a copy's use as use of the key's page."""
        page = self._pages[key]
        for order in (self._idle, self._unsaved):
            if page in order:
                order.move_to_end(page)

    def oldest_unsaved(self, count: int) -> list[tuple[bytes, int]]:
        """Keys and pages of the longest idle."""
        return [(self._keys[page], page) for page in itertools.islice(self._unsaved, count)]

    def unsave(self, key: bytes) -> None:
        """Notes that the second tier no longer holds this page."""
        page = self._pages.get(key)
        if page is not None and page in self._idle and page not in self._copied:
            self._unsaved[page] = None

    def evict(self, count: int) -> list[int]:
        """Evicts the `count` longest idle pages and returns them."""
        pages = list(itertools.islice((p for p in self._idle if p not in self._copied), count))
        before = len(self._unsaved)
        for page in pages:
            del self._idle[page]
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
        if not self._idle.keys() <= self._keys.keys():
            return "an idle page has no key"
        if not (self._unsaved.keys() <= self.idle_pages and self._copied <= self._idle.keys()):
            return "a page is to be saved, or being saved, and not idle"
        return ""
