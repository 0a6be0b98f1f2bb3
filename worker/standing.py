"""How a worker stands, whichever its role: whether it takes requests, and how busy it is."""

from __future__ import annotations

from typing import Protocol

from baton.core.config import Config
from baton.core.errors import Unavailable
from baton.core.types import Role, Work
from baton.engine.engine import Engine
from baton.v1 import worker_pb2 as pb
from baton.worker.admission import check_context, check_work, quarantine_fault
from baton.worker.metrics import WorkerMetrics


class Scheduler(Protocol):
    @property
    def waiting(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def queued_tokens(self) -> int: ...


class Standing:
    def __init__(self, role: Role, engine: Engine, metrics: WorkerMetrics, config: Config) -> None:
        self.draining = False
        self._role = role
        self._engine = engine
        self._pool = engine.pool
        self._metrics = metrics
        self._quarantine_share = config.quarantine_share

    def check(self, work: Work, most_tokens: int, quarantined: int) -> None:
        """Raises why the work cannot be taken, which may grow to so many tokens here."""
        if self.draining:
            raise self.drained()
        if fault := quarantine_fault(quarantined, self._pool.total, self._quarantine_share):
            raise Unavailable(fault)
        check_work(work, self._engine.architecture.vocabulary_size)
        check_context(most_tokens, self._engine.context_length)

    def drained(self) -> Unavailable:
        return Unavailable(f"the {self._role.value} worker is being drained")

    def load(self, scheduler: Scheduler, quarantined: int, transfers: int, leak: str) -> pb.Load:
        """What routers are told, and measured too. `leak` is what is wrong with the pool."""
        share = self._quarantine_share
        load = pb.Load(
            free_pages=self._pool.free,
            leased_pages=self._pool.leased - quarantined,
            quarantined_pages=quarantined,
            cached_pages=self._pool.cached,
            kept_pages=self._pool.kept,
            waiting=scheduler.waiting,
            running=scheduler.running,
            queued_tokens=scheduler.queued_tokens,
            fault=leak or quarantine_fault(quarantined, self._pool.total, share),
            transfers=transfers,
        )
        self._metrics.load(load)
        self._metrics.cache(self._pool)
        return load
