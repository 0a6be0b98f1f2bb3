"""The index of a pool's prefix cache: which pages hold known contents.

A full page is stored under its key (core/page_keys.py), leased or not. Known pages without
a lease are idle; the longest idle is evicted first. A lease returns its pages from the last
to the first, so what follows a prefix is evicted before the prefix: leaves go first, without
a tree. With a second tier, idle pages that it does not hold are unsaved.

Changes since the last report to routers are collected as a difference.
Owned by the pool and its thread.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Container, KeysView, Sequence, Set
from dataclasses import dataclass, field
from operator import eq

from baton.core.page_keys import page_keys


@dataclass(slots=True)
class Changes:
    """Keys that came and went; none is in both."""

    stored: dict[bytes, None] = field(default_factory=dict)
    evicted: dict[bytes, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.stored) + len(self.evicted)

    def store(self, key: bytes) -> None:
        self._move(key, self.evicted, self.stored)

    def evict(self, key: bytes) -> None:
        self._move(key, self.stored, self.evicted)

    def _move(self, key: bytes, opposite: dict[bytes, None], target: dict[bytes, None]) -> None:
        if key in opposite:
            del opposite[key]
        else:
            target[key] = None


class PrefixCache:
    def __init__(self) -> None:
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # the longest idle first
        self._unsaved: OrderedDict[int, None] = OrderedDict()  # idle pages, in the same order
        self._copied: set[int] = set()  # idle pages that a copy leases; they keep their order
        self._changes = Changes()
        self.below: Container[bytes] | None = None  # keys in the second tier
        # Totals since the start, in pages.
        self.looked_up = 0
        self.found = 0
        self.evictions = 0
        self.lost = 0  # evicted while unsaved

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
    def keys(self) -> list[bytes]:
        """Keys of all known pages, a parent before its children."""
        return list(self._pages)

    @property
    def changed(self) -> int:
        """Keys that came or went since `drain_changes`."""
        return len(self._changes)

    def drain_changes(self) -> Changes:
        changes, self._changes = self._changes, Changes()
        return changes

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest known prefix of `keys`."""
        pages = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def store(self, key: bytes, page: int) -> bool:
        """Stores a leased page. False when the key already has another page."""
        if self._pages.setdefault(key, page) != page:
            return False
        self._keys[page] = key
        self._changes.store(key)
        return True

    def forget(self, page: int) -> bytes | None:
        """Drops a leased page's contents; returns its key, if it had one."""
        key = self._keys.pop(page, None)
        if key is not None:
            del self._pages[key]
            self._changes.evict(key)
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


class KeyChain:
    """The keys of one request's pages, each hashed once as its tokens come."""

    __slots__ = ("_keys", "_root", "page_size")

    def __init__(self, root: bytes | None = None, page_size: int = 1) -> None:
        """`root` is the key before the first page; without one no page has a key."""
        self._root = root
        self.page_size = page_size
        self._keys: list[bytes] = []

    def keys(self, tokens: Sequence[int], length: int) -> list[bytes]:
        """Keys of the pages that the first `length` tokens fill. `tokens` may only grow."""
        known, full = len(self._keys), length // self.page_size
        if full > known and self._root is not None:
            parent = self._keys[-1] if known else self._root
            new = tokens[known * self.page_size : full * self.page_size]
            self._keys += page_keys(parent, new, self.page_size)
        return self._keys[:full]

    def to_find(self, tokens: Sequence[int]) -> list[bytes]:
        """Keys of the pages that a cache may provide: the last token is always computed."""
        return self.keys(tokens, len(tokens) - 1)

    def names(self, place: int, key: bytes) -> bool:
        """Whether page number `place` has this key, as far as keys were made."""
        return place < len(self._keys) and self._keys[place] == key
