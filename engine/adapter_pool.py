"""The LoRA adapters that an engine has loaded: a bounded number, by digest.

    wanted ─▶ loading, in a thread ─▶ loaded ─ idle longest, and its slot is needed ─▶ dropped
              │       ▲    └─▶ failed: the requests that wait for it fail
              └─ fetched: its files are not on this node

Slots go to the sequences of a step in the plan's order, oldest first. So the first always
advances, and a loaded adapter that a step uses is never dropped. Sequences that wait for an adapter
are left out of the step.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from baton.core.adapter_store import check_location
from baton.core.errors import AdapterMissing, BatonError, Internal, Unavailable
from baton.core.types import Adapter
from baton.engine.step import Plan

log = logging.getLogger(__name__)


Weights = TypeVar("Weights")


class AdapterHolder(Protocol[Weights]):
    """Holds a device's adapters; on rank 0 of a split model, makes the other ranks do the same."""

    def load_adapter(self, adapter: Adapter) -> Weights:
        """Called on any thread."""

    def add_adapter(self, adapter: Adapter, weights: Weights) -> None: ...

    def drop_adapter(self, digest: bytes) -> None: ...


class AdapterPool(Generic[Weights]):
    """Owned by the engine's thread."""

    def __init__(
        self,
        holder: AdapterHolder[Weights],
        slots: int,
        allowed: Iterable[str],
        wake: Callable[[], object],
        fetch: Callable[[Adapter], object] | None = None,
    ) -> None:
        """Holds at most `slots` adapters, from `allowed` locations only. Two functions are called
        on another thread: `wake` when a load has ended, and `fetch` to copy an adapter's files to
        this node; it may raise a BatonError."""
        self._holder = holder
        self._slots = slots
        self._allowed = tuple(allowed)
        self._wake = wake
        self._fetch = fetch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._loading: set[bytes] = set()
        self._ended: SimpleQueue[tuple[Adapter, Weights | BatonError]] = SimpleQueue()
        self.loaded: OrderedDict[bytes, None] = OrderedDict()  # idle longest first
        self.events: Counter[str] = Counter()  # requested, hit, loaded, evicted: how often

    @property
    def loading(self) -> bool:
        return bool(self._loading)

    def check(self, adapter: Adapter) -> None:
        """Raises InvalidAdapter for a location that the configuration does not allow."""
        check_location(adapter.folder, self._allowed)

    def request(self, adapter: Adapter, kept: Collection[bytes]) -> None:
        """Like `want`, but counts the request. Called once for each request."""
        self.events["requested"] += 1
        self.events["hit"] += self.want(adapter, kept)

    def want(self, adapter: Adapter, kept: Collection[bytes]) -> bool:
        """Returns True if the adapter is loaded. Otherwise begins to load it if there is a slot: a
        free one, or that of an adapter not in `kept`."""
        digest = adapter.digest
        if digest in self.loaded:
            return True
        if digest in self._loading or not self._make_room(kept):
            return False
        self._loading.add(digest)
        self._thread.submit(self._run, adapter)
        return False

    def load_now(self, adapter: Adapter) -> None:
        """Loads the adapter on the calling thread. Raises an error if it cannot be loaded."""
        self.check(adapter)
        if adapter.digest not in self.loaded:
            self._install(adapter, self._holder.load_adapter(adapter))

    def runnable(self, plan: Plan) -> Plan:
        """Returns the plan's sequences that need no adapter or have theirs loaded. Begins to load
        the other adapters."""
        kept: set[bytes] = set()
        chosen: Plan = {}
        for sequence, count in plan.items():
            adapter = sequence.work.adapter
            if adapter is None or self.want(adapter, kept):
                chosen[sequence] = count
            if adapter is not None:
                kept.add(adapter.digest)
        for digest in kept & self.loaded.keys():
            self.loaded.move_to_end(digest)
        return chosen

    def settle(self) -> dict[bytes, BatonError]:
        """Installs adapters whose loads have ended. Returns the errors of failed loads."""
        failed: dict[bytes, BatonError] = {}
        while self._loading:
            try:
                adapter, outcome = self._ended.get_nowait()
            except Empty:
                break
            self._loading.discard(adapter.digest)
            if isinstance(outcome, BatonError):
                failed[adapter.digest] = outcome
            else:
                self._install(adapter, outcome)
        return failed

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _make_room(self, kept: Collection[bytes]) -> bool:
        if len(self.loaded) + len(self._loading) < self._slots:
            return True
        idle = next((digest for digest in self.loaded if digest not in kept), None)
        if idle is None:
            return False
        del self.loaded[idle]
        self._holder.drop_adapter(idle)
        self.events["evicted"] += 1
        return True

    def _install(self, adapter: Adapter, weights: Weights) -> None:
        self._holder.add_adapter(adapter, weights)
        self.loaded[adapter.digest] = None
        self.events["loaded"] += 1

    def _load(self, adapter: Adapter) -> Weights:
        try:
            return self._holder.load_adapter(adapter)
        except (AdapterMissing, Unavailable):  # not on this node, or the hub does not answer
            if not self._fetch or not adapter.sources:
                raise
            self._fetch(adapter)
            return self._holder.load_adapter(adapter)

    def _run(self, adapter: Adapter) -> None:
        outcome: Weights | BatonError
        began = time.monotonic()
        try:
            outcome = self._load(adapter)
            seconds = time.monotonic() - began
            log.info(
                "adapter %s loaded in %.3f s: %s", adapter.digest.hex(), seconds, adapter.folder
            )
        except BatonError as error:
            outcome = error
        except Exception as error:
            log.exception("an adapter in %s cannot be loaded", adapter.folder)
            outcome = Internal(f"the adapter cannot be loaded: {error}")
        self._ended.put((adapter, outcome))
        self._wake()
