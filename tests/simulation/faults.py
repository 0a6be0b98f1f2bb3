"""What befalls a cluster: processes that die, freeze or drain, and connections that break."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.core.types import Role

from .fabric import SimulatedTransport
from .worker import SimulatedWorker

if TYPE_CHECKING:
    from .cluster import Cluster

FROZEN_SECONDS = 3.0
"""After so long a silence routers give a worker up."""


class Faults:
    def __init__(self, cluster: Cluster, due: list[int]) -> None:
        """One after each of so many events."""
        self._cluster = cluster
        self._world = cluster.world
        self._fabric = cluster.fabric
        self._counts = cluster.counts
        self._due = due

    def after_event(self) -> None:
        while self._due and self._world.events >= self._due[0]:
            self._due.pop(0)
            self._strike()

    def _strike(self) -> None:
        faults: list[Callable[[], None]] = [
            *(self._kill_worker, self._kill_worker, self._freeze_worker, self._freeze_worker),
            *(self._cut_stream, self._cut_fabric, self._stall_fabric, self._cancel),
            *(self._drain_worker, self._cut_and_freeze, self._stall_and_kill),
        ]
        if self._cluster.split:
            faults += [self._kill_rank, self._cut_fabric]
        if not self._cluster.may_lose_workers:
            faults += 2 * [self._fail_fabric, self._fail_and_kill]
        if sum(not router.dead for router in self._cluster.routers) > 1:
            faults.append(self._kill_router)
        self._world.random.choice(faults)()

    def _some_worker(self) -> SimulatedWorker | None:
        alive = [worker for worker in self._cluster.workers.values() if not worker.frozen]
        return self._world.random.choice(alive) if alive else None

    def _kill_worker(self) -> None:
        worker = self._some_worker()
        if worker is not None:
            self.kill(worker)

    def kill(self, worker: SimulatedWorker) -> None:
        if worker.dead:
            return
        self._world.log(worker.agent, "KILLED")
        self._counts["kills"] += 1
        for transport in worker.transports:
            if not transport.dead:
                self._fabric.kill(transport)
        worker.kill()
        del self._cluster.workers[worker.worker_id]
        if self._cluster.may_lose_workers and self._world.chance(0.3):
            worker.judged = False
            return
        seconds = self._world.random.random() * 4
        verdicts = [*worker.record.verdicts, worker.verdict]
        self._world.after(
            seconds, lambda: self._cluster.start(worker.worker_id, worker.kind, verdicts)
        )

    def _drain_worker(self) -> None:
        worker = self._some_worker()
        if worker is not None:
            self._world.log(worker.agent, "DRAINED")
            self._counts["drains"] += 1
            worker.drain()
            self._world.after(2.0, lambda: self.kill(worker))

    def _freeze_worker(self) -> None:
        worker = self._some_worker()
        if worker is not None:
            self._freeze(worker)

    def _freeze(self, worker: SimulatedWorker) -> None:
        seconds = self._world.random.choice((0.3, 1.5, 3.5, 8.0))
        self._world.log(worker.agent, f"FROZEN for {seconds:g} s")
        self._counts["freezes"] += 1
        worker.freeze()
        self._world.after(FROZEN_SECONDS, lambda: self._give_up(worker))
        self._world.after(seconds, lambda: self._thaw(worker))

    def _thaw(self, worker: SimulatedWorker) -> None:
        worker.thaw()
        for router in self._cluster.routers:  # which never stop looking for it
            router.watch(worker.worker_id)

    def _give_up(self, worker: SimulatedWorker) -> None:
        if worker.frozen:
            for stream in list(worker.streams.values()):
                stream.cut("it does not answer")

    def _cut_stream(self) -> None:
        worker = self._some_worker()
        if worker is not None and worker.streams:
            stream = self._world.random.choice(list(worker.streams.values()))
            self._world.log(worker.agent, f"stream to {stream.router.name} CUT")
            stream.cut("the connection broke")

    def _cut_fabric(self) -> None:
        if pair := self._some_pair():
            one, other = pair
            self._world.log(one.agent, f"connection to {other.agent} CUT")
            self._counts["cuts"] += 1
            self._fabric.cut(self._end_of(one), self._end_of(other))

    def _cut_and_freeze(self) -> None:
        """A connection breaks, and one side finds out much later than the other."""
        pair = self._some_pair()
        if pair and not pair[1].frozen:
            self._fabric.cut(self._end_of(pair[0]), self._end_of(pair[1]))
            self._freeze(pair[1])

    def _fail_fabric(self) -> None:
        """One can no longer answer the other, which can still write."""
        if pair := self._some_pair():
            one, other = self._world.random.sample(pair, 2)
            self._world.log(other.agent, f"connection to {one.agent} FAILED")
            self._counts["one-sided failures"] += 1
            self._fabric.fail(self._end_of(other), self._end_of(one))

    def _fail_and_kill(self) -> None:
        """A worker dies that another cannot reach anyway: only routers can tell of its death."""
        if pair := self._some_pair():
            one, other = self._world.random.sample(pair, 2)
            self._fabric.fail(self._end_of(other), self._end_of(one))
            self._world.after(self._world.random.random(), lambda: self.kill(one))

    def _stall_fabric(self) -> None:
        if pair := self._some_pair():
            one, other = pair
            self._world.log(one.agent, f"connection to {other.agent} STALLED")
            self._counts["stalls"] += 1
            seconds = self._world.random.choice((0.5, 2.0, 8.0, 25.0))
            self._fabric.stall(self._end_of(one), self._end_of(other), seconds)

    def _stall_and_kill(self) -> None:
        """What a worker had sent before it died arrives when its successor is long there."""
        if pair := self._some_pair():
            one, other = self._world.random.sample(pair, 2)
            self._world.log(one.agent, f"connection to {other.agent} STALLED")
            self._counts["stalls"] += 1
            self._fabric.stall(self._end_of(one), self._end_of(other), 12.0)
            self._world.after(self._world.random.random() * 0.1, lambda: self.kill(one))

    def _end_of(self, worker: SimulatedWorker) -> SimulatedTransport:
        """The end of some connection of its."""
        if not self._cluster.split:
            return worker.transport
        return self._world.random.choice(worker.transports)

    def _kill_rank(self) -> None:
        """A process of a worker dies; the worker finds out when it looks, and follows."""
        worker = self._some_worker()
        if worker is not None and not worker.transports[-1].dead:
            self._world.log(worker.agent, "a process KILLED")
            self._counts["processes killed"] += 1
            self._fabric.kill(worker.transports[-1])
            self._world.after(self._world.random.random() * 0.1, lambda: self.kill(worker))

    def _some_pair(self) -> tuple[SimulatedWorker, SimulatedWorker] | None:
        pairs = [
            (one, other)
            for one in self._cluster.workers.values()
            for other in self._cluster.workers.values()
            if (one.kind, other.kind) == (Role.PREFILL, Role.DECODE)
        ]
        return self._world.random.choice(pairs) if pairs else None

    def _cancel(self) -> None:
        live = [
            (router, request)
            for router in self._cluster.routers
            for request in router.requests.values()
            if not request.outcome
        ]
        if live:
            router, request = self._world.random.choice(live)
            router.cancel(request)

    def _kill_router(self) -> None:
        router = self._world.random.choice(self._cluster.routers)
        self._world.log(router.name, "KILLED")
        router.die()
