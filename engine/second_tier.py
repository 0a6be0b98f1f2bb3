"""The tier behind the page pool: evicted pages in host memory and files.

    ┌──────────────────┐ save  ┌─────────────────────┐ write ┌─────────────┐
    │ the pool's pages │──────▶│ rows of host memory │──────▶│    files    │
    │                  │◀──────│    (PageMemory)     │       │ (PageFiles) │
    └──────────────────┘       └─────────────────────┘       └─────────────┘
              ▲        restore                                      │
              └─────────────────────────────────────────────────────┘

Saving: a copy reads only pages that it leases, so nothing writes them meanwhile. Cached pages
are copied before they are evicted, the longest idle first, one batch at a time: without files
only those that will soon be evicted, with files all. A page evicted before its turn is lost;
nothing waits for a copy.

Restoring: `restore_pages` leases the pages that a prompt finds in the pool and free ones
after them, has these filled, names them and releases all. The waiting prompt then finds them
in the pool. The pages belong to the restoration, even if the prompt has ended. Pages that
cannot be read are computed. A restoring thread without progress for `STALL_SECONDS` is
abandoned.

Rows and files are page pools themselves, with known contents, an order of use, and leases
for the copies.

Copies run on their own threads. They post tasks to the pool's thread, which owns all state
and runs the tasks in `advance`, before each step; `wake` wakes it.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from baton.core.errors import Internal
from baton.engine.page_files import PageFiles, PageForm, Task
from baton.engine.page_memory import PageMemory
from baton.engine.page_pool import EmptyTier, Lease, PagePool
from baton.engine.prefix_cache import KeySet
from baton.engine.tier_copies import (
    Background,
    MakeBackground,
    Restoration,
    RestoreCosts,
    Save,
    Tier,
    TierCounts,
)

BATCH = 16
"""Pages saved at a time; in a small pool an eighth of it."""
READY_SHARE = 4
"""Without files, pages are saved until one in READY_SHARE of the pool can be reused without a
loss."""
STALL_SECONDS = 1.0


class SecondTier(EmptyTier):
    def __init__(
        self,
        pool: PagePool,
        memory: PageMemory,
        wake: Callable[[], None],
        make_background: MakeBackground,
    ) -> None:
        self._pool = pool
        self._memory = memory
        self._wake = wake
        self._make_background = make_background
        self._posted: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._saver = make_background("save-pages", self._post_crash)
        self._restorer = make_background("restore-pages", self._post_crash)
        self._writer: Background  # with files
        self.ready_pages = pool.total // READY_SHARE
        self._batch = max(1, min(BATCH, pool.total // 8))
        self.tiers = {
            Tier.HOST: PagePool(memory.staging, pool.page_size),
            Tier.FILES: PagePool(0, pool.page_size),
        }
        self.files: PageFiles | None = None
        self._kept = KeySet()  # keys in at least one tier
        self._saving: Save | None = None
        self._restoring: dict[Restoration, None] = {}
        self._coming: set[bytes] = set()
        self._abandoned: set[Restoration] = set()  # and still running
        self.changes = KeySet()  # keys that came or went since the last `drain`
        self._counts = {tier: TierCounts() for tier in Tier}
        self.costs = RestoreCosts(pool.page_size)
        pool.second_tier = pool.cache.second_tier = self

    def open_files(self, folder: Path, budget: int, form: PageForm) -> None:
        self._writer = self._make_background("write-pages", self._post_crash)
        self.files = PageFiles(folder, budget, form, self._writer.submit, self._post)
        self.tiers[Tier.FILES] = PagePool(self.files.capacity, self._pool.page_size)
        self.files.list_folder(self._end_listing)

    # Contents.

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def keys(self) -> list[bytes]:
        return list(self._kept)

    def size(self, tier: Tier) -> int:
        """The bytes of a tier's pages."""
        page = self._memory.row(self._memory.staging).nbytes
        if tier is Tier.FILES and self.files is not None:
            page = self.files.form.file_bytes
        return len(self.tiers[tier].cache) * page

    @property
    def counts(self) -> dict[Tier, TierCounts]:
        self._counts[Tier.HOST].dropped = self._pool.cache.lost
        for tier, pages in self.tiers.items():
            self._counts[tier].evicted = pages.cache.evictions
        return self._counts

    def _note_changes(self) -> None:
        """Notes keys that came to a tier or left it. Removes the files of keys that left."""
        rows, files = (self.tiers[tier].cache for tier in Tier)
        of_files = files.changes.drain()
        for key in {**rows.changes.drain(), **of_files}:
            if self.files is not None and key in of_files and key not in files:
                self.files.remove(key)
            if (key in rows or key in files) != (key in self._kept):
                self._kept.toggle(key)
                self.changes.toggle(key)
                if key not in self._kept:
                    self._pool.cache.unsave(key)

    # For the pool and the schedulers.

    @property
    def leases(self) -> list[Lease]:
        saving = [self._saving.lease] if self._saving else []
        return saving + [job.lease for job in self._restoring]

    def is_restoring(self, key: bytes) -> bool:
        return key in self._coming

    def restore_pages(self, keys: Sequence[bytes]) -> int:
        """Returns 0 if nothing is kept, or computing it takes less time."""
        pool, before = self._pool, self._pool.find(keys)
        count = pool.extend_hit(keys, _Restorable(pool.cache, self._kept, self._coming), before)
        if count <= before or self._abandoned:
            return 0
        wanted = pool.keys_of_hit(keys[:count])
        known = [key for key in wanted if key in pool.cache]
        missing = [key for key in wanted if key not in pool.cache]
        rows = [next(iter(self.tiers[Tier.HOST].cache.find([key])), None) for key in missing]
        found = list(map(pool.cache.page_of, known))
        if not self._pays(rows, count - before):
            return 0
        if pool.lease_cost(found, len(wanted)) > pool.free:
            return 0
        lease = pool.lease(found, len(missing))
        job = Restoration([*known, *missing], lease, rows, keys[before])
        for pages in self.tiers.values():
            held = [page for key in job.missing for page in pages.cache.find([key])]
            job.held.append(pages.lease(held))
        self._restoring[job] = None
        self._coming.update(job.coming)
        self._restorer.submit(lambda: self._run_restoration(job))
        return count - before

    def forget(self, key: bytes) -> None:
        for tier in Tier:
            self._forget(tier, key)

    def check(self) -> str:
        coming = {key for job in self._restoring for key in job.coming}
        if coming != self._coming:
            return "a page counts as coming from the second tier and is not"
        rows, files = (self.tiers[tier] for tier in Tier)
        if self._kept.keys() != rows.cache.keys | files.cache.keys:
            return "a page counts as kept in the second tier and is not, or the reverse"
        return rows.check_integrity()  # there may be too many files to count

    # The loop.

    def advance(self) -> None:
        while not self._posted.empty():
            self._posted.get()()
        self._abandon_stalled()
        if self._saving is None:
            self._save(self._pool.cache.oldest_unsaved(self._pages_to_save()))

    def close(self, seconds: float, *, save: bool = True) -> None:
        """Stops all copies within `seconds`; with files, saves what the pool holds first."""
        deadline = time.monotonic() + seconds
        backgrounds = [self._saver, self._restorer]
        if self.files is not None:
            if save:
                self._flush(self.files, deadline)
            backgrounds.insert(0, self._writer)
        for background in backgrounds:
            background.stop(max(0.0, deadline - time.monotonic()))

    def _flush(self, files: PageFiles, deadline: float) -> None:
        self.advance()
        while (self._saving or files.pending) and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._posted.get(timeout=left)()
            self.advance()

    def _post(self, task: Task) -> None:
        """Posts a task to the pool's thread. Called from any thread."""
        self._posted.put(task)
        self._wake()

    def _post_crash(self, error: BaseException) -> None:
        def fail() -> None:
            raise Internal(f"a thread that copies pages stopped: {error!r}")

        self._post(fail)

    # Saving.

    def _pages_to_save(self) -> int:
        cache = self._pool.cache
        files = self.files if self.files is not None and self.files.accepts_pages else None
        # Leaves pages to allocate while others are copied.
        wanted = min(self._batch, self._pool.free // 2)
        if files is None:
            wanted = min(wanted, self.ready_pages - (self._pool.free - cache.unsaved))
        # New saves must not evict recent ones.
        room = max(self.tiers[Tier.HOST].total, files.capacity if files else 0)
        return max(0, min(wanted, -(-room // 2) - (cache.idle - cache.unsaved)))

    def _save(self, batch: list[tuple[bytes, int]]) -> None:
        """Starts to save idle pages, given with their keys."""
        batch = batch[: self.tiers[Tier.HOST].free]
        if batch:
            keys, pages = zip(*batch, strict=True)
            rows = self.tiers[Tier.HOST].acquire(len(batch))
            self._note_changes()
            save = self._saving = Save(keys, self._pool.lease_idle(list(pages)), rows)
            self._saver.submit(lambda: self._run_save(save))

    def _run_save(self, save: Save) -> None:
        self._memory.copy(list(zip(save.lease.pages, save.rows.pages, strict=True)))
        self._post(partial(self._end_save, save))

    def _end_save(self, save: Save) -> None:
        self._saving = None
        for key, page, row in zip(save.keys, save.lease.pages, save.rows.pages, strict=True):
            if self._pool.cache.find([key]) == [page]:  # not forgotten meanwhile
                self._store(key, row)
        save.rows.release()
        save.lease.release()

    def _store(self, key: bytes, row: int) -> None:
        rows, files = (self.tiers[tier] for tier in Tier)
        rows.cache.store(key, row)
        self._note_changes()
        self._counts[Tier.HOST].stored += 1
        if self.files is None or key in files.cache:
            return
        if self.files.accepts_pages and files.free:
            with files.acquire(1) as file:  # evicts the least recently used, if need be
                file.name([key])
            self._note_changes()
            end = partial(self._end_write, key, rows.lease([row]))
            self.files.write(key, self._memory.row(row), end)
        else:
            self._counts[Tier.FILES].dropped += 1

    def _end_write(self, key: bytes, row: Lease, written: bool | None) -> None:
        row.release()
        if written:
            self._counts[Tier.FILES].stored += 1
        else:
            self._forget(Tier.FILES, key)

    def _end_listing(self, listed: list[bytes] | None) -> None:
        """Adds the listed files, as older than those written meanwhile."""
        if self.files is None or not listed:
            return
        files = self.tiers[Tier.FILES]
        newer = list(files.cache.keys)
        old = [key for key in listed if key not in files.cache]
        surplus = max(0, len(old) - (files.free - files.cached))
        for key in old[:surplus]:
            self.files.remove(key)
        files.cache.evictions += surplus
        with files.acquire(len(old) - surplus) as added:
            added.name(old[surplus:][::-1])  # pages return in reverse: the oldest is evicted first
        for key in newer:
            files.hold([key]).release()
        self._note_changes()

    def _forget(self, tier: Tier, key: bytes) -> None:
        with self.tiers[tier].hold([key]) as held:
            held.forget()
        self._note_changes()

    # Restoring.

    def _pays(self, rows: Sequence[int | None], places: int) -> bool:
        tiers = [Tier.FILES if row is None else Tier.HOST for row in rows]
        for tier in tiers:
            self._counts[tier].hits += 1
        queued = [tier for job in self._restoring for tier in job.tiers[job.done :]]
        return self.costs.pays(tiers, queued, places)

    def _run_restoration(self, job: Restoration) -> None:
        job.run(self._memory, self.files)
        self._post(partial(self._end_restoration, job))

    def _end_restoration(self, job: Restoration) -> None:
        if job in self._abandoned:
            self._abandoned.remove(job)
            return
        del self._restoring[job]
        self._coming.difference_update(job.coming)
        for held in job.held:
            held.release()
        job.lease.name(job.keys[: job.found + job.done])
        job.lease.release()
        came = job.tiers[: job.done]
        for tier in Tier:
            self._counts[tier].restored += came.count(tier)
            self.costs.copies[tier].add(came.count(tier), job.seconds[tier])
        if job.damaged:
            self._counts[Tier.FILES].damaged += 1
            self.forget(job.missing[job.done])

    def _abandon_stalled(self) -> None:
        if not self._restoring:
            return
        if time.monotonic() - max(job.moved for job in self._restoring) > STALL_SECONDS:
            for job in list(self._restoring):
                job.cancel()
                self._end_restoration(job)
                self._abandoned.add(job)


@dataclass(frozen=True, slots=True)
class _Restorable(Container[bytes]):
    """Keys of pages that are in the pool, or kept and not being restored."""

    cached: Container[bytes]
    kept: Container[bytes]
    coming: Container[bytes]

    def __contains__(self, key: object) -> bool:
        return key in self.cached or (key in self.kept and key not in self.coming)


def second_tier_of(pool: PagePool) -> SecondTier | None:
    return pool.second_tier if isinstance(pool.second_tier, SecondTier) else None
