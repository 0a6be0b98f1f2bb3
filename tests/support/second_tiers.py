"""Pools with a second tier whose copies a test runs step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import torch

from baton.core.page_keys import page_keys, salted_root
from baton.engine.page_files import PageForm, Task
from baton.engine.page_memory import page_memory
from baton.engine.page_pool import Lease, PagePool
from baton.engine.second_tier import SecondTier

PAGE = 4
ROOT = b"root of the keys"
PAGE_BYTES = 64
FORM = PageForm(ROOT, "float32", PAGE, PAGE_BYTES)


class ManualBackground:
    """Runs tasks in order, on demand."""

    def __init__(self) -> None:
        self.tasks: deque[Task] = deque()

    def submit(self, task: Task) -> None:
        self.tasks.append(task)

    def stop(self, seconds: float) -> None:
        self.run()

    def run(self, count: int | None = None) -> None:
        """Runs the first `count` tasks, or all."""
        left = len(self.tasks) if count is None else count
        while self.tasks and left:
            self.tasks.popleft()()
            left -= 1


class TieredPool:
    """A pool of pages, a second tier of `rows` and, with a folder, of `files` files.

    A page's contents follow from its key, so wrong contents are detected.
    """

    def __init__(
        self, pages: int = 8, rows: int = 8, folder: Path | None = None, files: int = 100
    ) -> None:
        self.pool = PagePool(pages, PAGE, ROOT)
        self.kv = torch.zeros(pages, PAGE_BYTES // 4)
        self.backgrounds: dict[str, ManualBackground] = {}
        memory = page_memory(self.kv, rows)
        self.tier = SecondTier(self.pool, memory, lambda: None, self._make_background)
        if folder is not None:
            self.tier.open_files(folder, files * FORM.file_bytes, FORM)

    def _make_background(
        self, name: str, on_crash: Callable[[BaseException], None]
    ) -> ManualBackground:
        return self.backgrounds.setdefault(name, ManualBackground())

    @property
    def cache(self) -> str:
        return self.pool.check_integrity()

    def compute(self, text: str) -> Lease:
        """A lease on the text's pages; missing ones are written."""
        chain = keys(text)
        lease = self.pool.acquire(len(chain), chain)
        self.check(lease, chain)
        for page, key in list(zip(lease.pages, chain, strict=True))[lease.found :]:
            self.kv[page] = contents(key)
        lease.name(chain)
        return lease

    def check(self, lease: Lease, chain: Sequence[bytes]) -> None:
        """Checks the pages' contents bit by bit."""
        for page, key in list(zip(lease.pages, chain, strict=False))[: lease.found]:
            assert torch.equal(self.kv[page], contents(key))

    def keep(self, text: str) -> None:
        self.compute(text).release()

    def fill_pool(self) -> None:
        """Evicts everything."""
        lease = self.pool.acquire(self.pool.free)
        self.kv[lease.pages] = -1.0
        lease.release()

    def settle(self) -> None:
        """Runs all copies and those that follow."""
        self.pool.second_tier.advance()
        while any(background.tasks for background in self.backgrounds.values()):
            for background in self.backgrounds.values():
                background.run()
            self.pool.second_tier.advance()

    def found(self, text: str) -> str:
        """How much of a text the pool holds after all possible restores."""
        self.pool.second_tier.restore_pages(keys(text))
        self.settle()
        with self.compute(text) as lease:
            return text[: lease.found]


def keys(text: str) -> list[bytes]:
    """A page for each letter."""
    tokens = [ord(letter) for letter in text for _ in range(PAGE)]
    return page_keys(salted_root(ROOT, ""), tokens, PAGE)


def contents(key: bytes) -> torch.Tensor:
    digest = blake2b(key, digest_size=PAGE_BYTES).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8).float()[: PAGE_BYTES // 4]
