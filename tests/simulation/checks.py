"""What must hold in a cluster: whenever bytes arrive, and once all is at rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.errors import Internal, PoisonRequest, QuarantineFull, WorkerDrained, WorkerLost
from baton.core.types import AttemptKey, Role
from baton.decode_worker.decode_phase import DecodePhase
from baton.engine.page_pool import Lease
from baton.engine.second_tier import second_tier_of
from baton.engine.tier_copies import Tier
from baton.kv_transfer.receiver import ReceiverState
from baton.prefill_worker.prefill_phase import PrefillPhase

from .fabric import Write
from .router import MAX_DEATHS, SimulatedRequest
from .worker import SimulatedWorker
from .world import Violation

if TYPE_CHECKING:
    from .cluster import Cluster


MOST_CRASHES = MAX_DEATHS + 1
"""Of workers, by one request, where verdicts come (router/requests/verdicts.py)."""

UNLUCKY = {error.reason for error in (PoisonRequest, WorkerLost, WorkerDrained, QuarantineFull)}
"""How no request fails that crashed nothing."""


class Checks:
    """Each raises Violation."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._counts = cluster.counts

    def landing(self, write: Write) -> None:
        """Bytes may only change in pages that are held for this very attempt."""
        processes = self._cluster.processes
        sender, receiver = processes[write.sender.agent], processes[write.endpoint.peer.agent]
        key = sender.push_of(write)
        expected = receiver.transfer._transfers._receivers.get(key)
        self._world.log(sender.agent, f"{key} lands in {write.remote_pages} of {receiver.agent}")
        if expected is None or expected.peer != sender.agent:
            raise Violation(f"{key} writes to {receiver.agent}, which does not expect it")
        if expected.state not in (ReceiverState.OPEN, ReceiverState.QUARANTINED):
            raise Violation(f"{key} writes into a reservation that is {expected.state}")
        lease = _expected_in(receiver, key)
        if lease is None or lease.released or not set(write.remote_pages) <= set(lease.held):
            raise Violation(f"{key} writes into pages of {receiver.agent} that it does not hold")
        pool = receiver.engine.pool
        for page in write.remote_pages:
            if page in pool.cache.known_pages or pool._holders[page] != 1:
                raise Violation(f"{key} writes into page {page}, which others may read")
        if expected.state is ReceiverState.QUARANTINED:
            what = "fetched" if receiver.kind is Role.PREFILL else "pushed"
            self._counts["writes into quarantine"] += 1
            self._counts[f"{what} into quarantine"] += 1
        self._source(sender, key, write)

    def _source(self, sender: SimulatedWorker, key: AttemptKey, write: Write) -> None:
        lease = _sent_from(sender, key)
        if lease is None or lease.released or not set(write.local_pages) <= set(lease.held):
            raise Violation(f"{key} reads pages of {sender.agent} that it does not hold")

    def rest(self) -> None:
        for router in self._cluster.routers:
            for request in router.requests.values():
                if not request.outcome:
                    raise Violation(f"{request.name} never ended")
                broken = request.name in self._cluster.breaks_at
                crashes = request.name in self._cluster.crashes_at
                if request.outcome == Internal.reason and not broken:
                    raise Violation(f"{request.name} failed with another request")
                if request.outcome in UNLUCKY and not crashes:
                    raise Violation(f"{request.name} failed, though it crashed nothing")
                self._counts[request.outcome] += 1
                self._counts["retries"] += max(len(request.retries.placements) - 1, 0)
                if not self._cluster.faults:
                    self._undisturbed(request)
        crashed = {each for each in self._cluster.processes.values() if each.crashed}
        self._counts["crashes"] += len(crashed)
        judged = sum(each.judged for each in crashed)
        if judged > MOST_CRASHES:
            raise Violation(f"one request crashed {judged} workers")
        for worker in self._cluster.workers.values():
            self._idle(worker)
        self._caches()

    def _caches(self) -> None:
        """Equal keys mean equal contents, on every worker that ever was."""
        contents: dict[bytes, list[int]] = {}
        for worker in dict.fromkeys(self._cluster.processes.values()):
            cache = worker.engine.pool.cache
            self._counts["pages found"] += cache.found
            self._counts["evictions"] += cache.evictions
            tier = second_tier_of(worker.engine.pool)
            if tier is not None:
                self._counts["pages restored"] += tier.counts[Tier.HOST].restored
            for key in cache.keys:
                (page,) = cache.find([key])
                content = worker.engine.memory[page]
                if contents.setdefault(key, content) != content:
                    raise Violation(f"page {page} of {worker.agent} is not what its key says")

    def _undisturbed(self, request: SimulatedRequest) -> None:
        if request.outcome != "finished":
            raise Violation(f"{request.name} failed without a fault: {request.outcome}")
        # Where both pools are full, the youngest prompt has to go and come back.
        reasons = [placement.reason for placement in request.retries.placements[1:]]
        disturbed = any("pools are full" not in reason for reason in reasons)
        if disturbed and not self._cluster.fabric.damage:
            raise Violation(f"{request.name} was tried again without a fault: {reasons}")

    def _idle(self, worker: SimulatedWorker) -> None:
        pool, transfers, role = worker.engine.pool, worker.transfer._transfers, worker.role
        held = {
            "pages": pool.leased,
            "requests": len(role._jobs),
            "quarantines": len(role._leaving),
            "loans": len(role._loans) if isinstance(role, DecodePhase) else 0,
            "fetches": len(role._fetches) if isinstance(role, PrefillPhase) else 0,
            "pushes": len(transfers._senders),
            "writes": len(transfers._writes)
            + sum(len(transport.writes) for transport in worker.transports),
            "reservations": len(transfers._receivers),
            "waiting": role._scheduler.waiting + role._scheduler.running,
        }
        left = {what: count for what, count in held.items() if count}
        if left or pool.check_integrity(held=0):
            raise Violation(f"{worker.agent} at rest still holds {left}; {pool.check_integrity()}")


def _expected_in(worker: SimulatedWorker, key: AttemptKey) -> Lease | None:
    """The pages that wait for an attempt's to arrive: a prompt's, or those that are fetched."""
    if isinstance(worker.role, PrefillPhase):
        return worker.role._fetches._leases.get(key)
    travelling = worker.role._scheduler._travelling.get(key)
    return travelling.lease if travelling else worker.role._leaving._leases.get(key)


def _sent_from(worker: SimulatedWorker, key: AttemptKey) -> Lease | None:
    """The pages that an attempt's push reads."""
    if isinstance(worker.role, DecodePhase):
        return worker.role._loans._leases.get(key)
    job = worker.role._jobs.get(key)
    return job.lease if job else worker.role._leaving._leases.get(key)
