"""Which pages hold known contents: the index of a pool's prefix cache.

A page that is full and will not change any more is stored under its key
(core/page_keys.py), whether a lease holds it or not. Known pages that no lease
holds are idle; the one that has been idle for the longest is evicted first. A
lease gives its pages back from the last to the first, so what follows a prefix
is evicted before the prefix: leaves go first, without a tree.

Idle pages that are not in the second tier are unsaved, where there is one.

What changes is written down for routers, as the difference to what they were
told last. Belongs to the pool, and to its thread.
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
        if key in self.evicted:
            del self.evicted[key]
        else:
            self.stored[key] = None

    def evict(self, key: bytes) -> None:
        if key in self.stored:
            del self.stored[key]
        else:
            self.evicted[key] = None


class PrefixCache:
    def __init__(self) -> None:
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # the longest idle first
        # Of these, in the same order. The copied have a lease that reads them and keep their place.
        self._unsaved: OrderedDict[int, None] = OrderedDict()
        self._copied: set[int] = set()
        self._changes = Changes()
        self.below: Container[bytes] | None = None  # what the second tier holds
        # Counted from the start.
        self.looked_up = 0  # pages
        self.found = 0
        self.evictions = 0
        self.lost = 0  # of these, the unsaved

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
        """Of all known pages, a parent before its children."""
        return list(self._pages)

    @property
    def changed(self) -> int:
        """How many keys came or went since `drain_changes`."""
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

    def knows(self, page: int) -> bool:
        return page in self._keys

    def store(self, key: bytes, page: int) -> bool:
        """Remembers a page that a lease holds. False when the key has another page already."""
        if self._pages.setdefault(key, page) != page:
            return False
        self._keys[page] = key
        self._changes.store(key)
        return True

    def forget(self, page: int) -> bytes | None:
        """The contents of a page that a lease holds are not to be used again. Its key, if any."""
        key = self._keys.pop(page, None)
        if key is not None:
            del self._pages[key]
            self._changes.evict(key)
        return key

    def wake(self, page: int) -> None:
        """A lease takes a known page."""
        self._idle.pop(page, None)
        self._unsaved.pop(page, None)
        self._copied.discard(page)

    def copy(self, page: int) -> None:
        """A lease takes an idle page, but does not count as use."""
        self._unsaved.pop(page, None)
        self._copied.add(page)

    def rest(self, page: int) -> bool:
        """The last lease gives a page back. False when it is not known, and so free."""
        self._copied.discard(page)
        if page not in self._keys:
            return False
        self._idle.setdefault(page, None)
        if self.below is not None and self._keys[page] not in self.below:
            self._unsaved[page] = None
        return True

    def touch(self, key: bytes) -> None:
        """Somebody has used a copy of the key's page up to now."""
        page = self._pages[key]
        for order in (self._idle, self._unsaved):
            if page in order:
                order.move_to_end(page)

    def oldest_unsaved(self, count: int) -> list[tuple[bytes, int]]:
        """Keys and pages of those that have been idle for the longest."""
        return [(self._keys[page], page) for page in itertools.islice(self._unsaved, count)]

    def unsave(self, key: bytes) -> None:
        """The second tier does not hold this page any more."""
        page = self._pages.get(key)
        if page is not None and page in self._idle and page not in self._copied:
            self._unsaved[page] = None

    def evict(self, count: int) -> list[int]:
        """The `count` pages that have been idle for the longest, which hold nothing now."""
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
        """Empty when the index agrees with itself; else what is wrong."""
        pages = map(self._pages.get, self._keys.values())
        if len(self._pages) != len(self._keys) or not all(map(eq, pages, self._keys)):
            return "a key and its page do not know each other"
        if not self._idle.keys() <= self._keys.keys():
            return "an idle page has no key"
        if not (self._unsaved.keys() <= self.idle_pages and self._copied <= self._idle.keys()):
            return "a page is to be saved, or being saved, and not idle"
        return ""


class KeyChain:
    """The keys of one request's pages, hashed as its tokens come, each once."""

    __slots__ = ("_keys", "_root", "page_size")

    def __init__(self, root: bytes | None = None, page_size: int = 1) -> None:
        """`root` is the key before the first page; without one no page has a key."""
        self._root = root
        self.page_size = page_size
        self._keys: list[bytes] = []

    def keys(self, tokens: Sequence[int], length: int) -> list[bytes]:
        """Of the pages that the first `length` tokens fill. `tokens` only ever grow."""
        known, full = len(self._keys), length // self.page_size
        if full > known and self._root is not None:
            parent = self._keys[-1] if known else self._root
            new = tokens[known * self.page_size : full * self.page_size]
            self._keys += page_keys(parent, new, self.page_size)
        return self._keys[:full]

    def to_find(self, tokens: Sequence[int]) -> list[bytes]:
        """Of the pages that may be taken from a cache: the last token is always computed."""
        return self.keys(tokens, len(tokens) - 1)

    def names(self, place: int, key: bytes) -> bool:
        """Whether its page number `place` has this key, as far as it was asked for."""
        return place < len(self._keys) and self._keys[place] == key
