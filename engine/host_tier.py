"""Which row of host memory holds which page: the index of the second tier's memory.

    free ─take─▶ being filled ─store─▶ held ─take of another, remove─▶ free
                      └────────give_back────────────────────────────────▲

Rows are taken from the free ones, then from the page that has been unused for
the longest. A row that is being copied from is pinned: it is not taken, and a
page that is removed meanwhile leaves it when the last pin goes.

Belongs to the pool's thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, KeysView


class HostTier:
    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._free = list(range(rows))
        self._held: OrderedDict[bytes, int] = OrderedDict()  # the longest unused first
        self._pins: Counter[int] = Counter()
        self._removed: set[int] = set()  # pinned, and without a page since

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    @property
    def keys(self) -> KeysView[bytes]:
        return self._held.keys()

    def find(self, key: bytes) -> int | None:
        return self._held.get(key)

    def take(self) -> tuple[int, bytes | None] | None:
        """A row to fill, and the key of the page that had to leave it. None when all are busy."""
        if self._free:
            return self._free.pop(), None
        for key, row in self._held.items():
            if not self._pins[row]:
                del self._held[key]
                return row, key
        return None

    def store(self, key: bytes, row: int) -> None:
        """The row that was taken holds the page from now on."""
        self._held[key] = row

    def give_back(self, row: int) -> None:
        """The row that was taken is not needed."""
        self._free.append(row)

    def touch(self, keys: Iterable[bytes]) -> None:
        """These were used, the last of them most recently."""
        for key in keys:
            if key in self._held:
                self._held.move_to_end(key)

    def remove(self, key: bytes) -> None:
        row = self._held.pop(key, None)
        if row is None:
            return
        if self._pins[row]:
            self._removed.add(row)
        else:
            self._free.append(row)

    def pin(self, row: int) -> None:
        self._pins[row] += 1

    def unpin(self, row: int) -> None:
        self._pins[row] -= 1
        if not self._pins[row]:
            del self._pins[row]
            if row in self._removed:
                self._removed.remove(row)
                self._free.append(row)

    def check(self, taken: int) -> str:
        """Empty when every row is free, held, removed while pinned, or one of those `taken`."""
        rows = [*self._free, *self._held.values(), *self._removed]
        if len(rows) + taken != self.rows or len(set(rows)) != len(rows):
            return f"of {self.rows} rows of host memory {len(set(rows)) + taken} are accounted for"
        return ""
