"""One seed: a cluster, its requests, its faults, and what must hold."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial

from core.config import Config, DecodeConfig, PrefillConfig, RouterConfig
from core.errors import Internal
from core.types import AttemptKey, Role, Sampling, Work
from decode_worker.role import DecodeRole
from engine.page_pool import Lease
from engine.restore_costs import Tier
from kv_transfer.receiver import State
from prefill_worker.role import PrefillRole

from .engine import VOCABULARY, reference
from .fabric import Fabric, SimulatedTransport, Write
from .router import SimulatedRequest, SimulatedRouter
from .streams import Stream
from .worker import SimulatedWorker
from .world import Violation, World

REST_SECONDS = 400.0
FROZEN_SECONDS = 3.0
"""After so long a silence routers give a worker up."""


class Cluster:
    """Everything that a seed decides. With `split`, workers may be several processes, each with
    some heads of every page."""

    def __init__(self, seed: int, *, split: bool = False, trace: bool = False) -> None:
        self.world = World(seed, trace=trace)
        draw = self.world.random
        self.faults = draw.choice((0, 1, 1, 2, 2, 3, 4))
        self.world.bad_day = self.faults > 0
        # A decode worker that cannot reach a prefill worker learns of its death only from a
        # router, when the worker is back. So connections fail on one side, or workers stay away.
        self.may_lose_workers = draw.random() < 0.5
        self.split = split
        self.digests = draw.random() < 0.5 or split
        damage = 0.2 if self.digests and draw.random() < 0.4 else 0.0
        duplicates = draw.choice((0.02, 0.2))
        self.fabric = Fabric(self.world, self._check_landing, damage, duplicates)
        self.config = Config(
            prefix_cache=seed % 2 == 1,
            page_size=4 if split else draw.choice((2, 3, 4)),
            router=RouterConfig(),
            prefill=PrefillConfig(chunk_tokens=draw.choice((3, 4, 8))),
            decode=DecodeConfig(
                max_batch=draw.choice((1, 2, 4)), chunk_tokens=4, ticket_seconds=30.0
            ),
        )
        self.second_tier = seed % 4 == 3
        self.pages = draw.choice((6, 7, 8, 12))
        # A request that no engine can compute from some position on.
        self.breaks_at = {"r0": draw.randint(1, 12)} if self.faults and draw.random() < 0.1 else {}
        self.workers: dict[str, SimulatedWorker] = {}  # by name, the process that lives
        self.processes: dict[str, SimulatedWorker] = {}  # by agent, every process there was
        self.counts = self.world.counts
        self._incarnations = itertools.count(1)
        self._attachments = itertools.count(1)
        self.routers = [
            SimulatedRouter(
                self.world, f"router{i}", self._attach, fetches=self.config.prefix_cache
            )
            for i in range(draw.choice((1, 1, 2)))
        ]
        for role in (Role.PREFILL, Role.DECODE):
            for i in range(draw.choice((1, 2))):
                self._start(f"{role.value}{i}", role)
        self._plan_requests()
        if self.config.prefix_cache:
            self._plan_forgetting()
        self._fault_at = sorted(draw.randint(1, 150) for _ in range(self.faults))
        self.world.after_event = self._after_event

    def run(self) -> Counter[str]:
        """How the requests ended, and what else was seen. Raises Violation."""
        self.world.run(until=REST_SECONDS)
        self._check_rest()
        self.counts["events"] += self.world.events
        return self.counts

    # What happens.

    def _plan_requests(self) -> None:
        draw = self.world.random
        # With a cache there are more requests, and some come after others have ended.
        more, spread = (2, 0.5) if self.config.prefix_cache else (1, 0.1)
        asked: list[tuple[float, Work]] = []
        for number in range(draw.choice((1, 2, 3, 4)) * more):
            at, prompt = draw.random() * spread, self._prompt()
            if self.config.prefix_cache and asked and draw.random() < 0.5:
                before, earlier = draw.choice(asked)
                at, prompt = at + before, _next_turn(earlier, prompt)
            asked.append((at, self._work(number, prompt)))
            request = SimulatedRequest(asked[-1][1])
            self.world.after(at, partial(self._submit, draw.choice(self.routers), request))

    def _plan_forgetting(self) -> None:
        """Prefill loses what it has cached, now and then, and can fetch it from decode."""
        draw = self.world.random
        for _ in range(draw.choice((0, 2, 4))):
            self.world.after(draw.random() * 1.5, self._forget)

    def _forget(self) -> None:
        for worker in self.workers.values():
            if worker.kind is Role.PREFILL:
                pool = worker.engine.pool
                pool.acquire(pool.free).release()

    def _prompt(self) -> list[int]:
        draw = self.world.random
        length = draw.randint(1, min(9, self.config.page_size * self.pages - 1))
        tokens = [draw.randrange(VOCABULARY) for _ in range(length)]
        return _begun_alike(tokens) if self.config.prefix_cache else tokens

    def _work(self, number: int, prompt: list[int]) -> Work:
        most = self.pages * self.config.page_size
        prompt = prompt[: most - 1]
        return Work(
            key=AttemptKey(f"r{number}", 1),
            prompt_tokens=prompt,
            sampling=Sampling(),
            max_tokens=self.world.random.randint(1, min(6, most - len(prompt))),
            stop_token_ids=frozenset({5}),
        )

    def _submit(self, router: SimulatedRouter, request: SimulatedRequest) -> None:
        if router.dead:
            return
        router.submit(request)
        if self.faults and self.world.chance(0.15):
            self.world.after(self.world.random.random() * 0.2, lambda: router.cancel(request))

    def _start(self, name: str, role: Role) -> None:
        incarnation = next(self._incarnations)
        worker = SimulatedWorker(
            *(self.world, self.fabric, name, role, self.config),
            pages=self.pages,
            digests=self.digests,
            incarnation=incarnation,
            second_tier=self.second_tier,
            shards=self.world.random.choice((1, 2, 2)) if self.split else 0,
        )
        worker.on_crash = lambda: self._kill(worker)
        for transport in worker.transports:
            self.processes[transport.agent] = worker
        worker.engine.breaks_at = self.breaks_at
        self.workers[name] = worker
        for router in self.routers:
            router.watch(name)

    def _attach(self, router: SimulatedRouter, name: str) -> Stream | None:
        worker = self.workers.get(name)
        if worker is None or worker.frozen:
            return None
        stream = Stream(self.world, router, worker, next(self._attachments))
        worker.attach(stream)
        return stream

    # Faults.

    def _after_event(self) -> None:
        while self._fault_at and self.world.events >= self._fault_at[0]:
            self._fault_at.pop(0)
            self._fault()

    def _fault(self) -> None:
        faults: list[Callable[[], None]] = [
            *(self._kill_worker, self._kill_worker, self._freeze_worker, self._freeze_worker),
            *(self._cut_stream, self._cut_fabric, self._stall_fabric, self._cancel),
            *(self._drain_worker, self._cut_and_freeze, self._stall_and_kill),
        ]
        if self.split:
            faults += [self._kill_rank, self._cut_fabric]
        if not self.may_lose_workers:
            faults += 2 * [self._fail_fabric, self._fail_and_kill]
        if sum(not router.dead for router in self.routers) > 1:
            faults.append(self._kill_router)
        self.world.random.choice(faults)()

    def _some_worker(self) -> SimulatedWorker | None:
        alive = [worker for worker in self.workers.values() if not worker.frozen]
        return self.world.random.choice(alive) if alive else None

    def _kill_worker(self) -> None:
        worker = self._some_worker()
        if worker is not None:
            self._kill(worker)

    def _kill(self, worker: SimulatedWorker) -> None:
        if worker.dead:
            return
        self.world.log(worker.agent, "KILLED")
        self.counts["kills"] += 1
        for transport in worker.transports:
            if not transport.dead:
                self.fabric.kill(transport)
        worker.kill()
        del self.workers[worker.worker_id]
        if self.may_lose_workers and self.world.chance(0.3):
            return
        seconds = self.world.random.random() * 4
        self.world.after(seconds, lambda: self._start(worker.worker_id, worker.kind))

    def _drain_worker(self) -> None:
        worker = self._some_worker()
        if worker is not None:
            self.world.log(worker.agent, "DRAINED")
            self.counts["drains"] += 1
            worker.drain()
            self.world.after(2.0, lambda: self._kill(worker))

    def _freeze_worker(self) -> None:
        worker = self._some_worker()
        if worker is not None:
            self._freeze(worker)

    def _freeze(self, worker: SimulatedWorker) -> None:
        seconds = self.world.random.choice((0.3, 1.5, 3.5, 8.0))
        self.world.log(worker.agent, f"FROZEN for {seconds:g} s")
        self.counts["freezes"] += 1
        worker.freeze()
        self.world.after(FROZEN_SECONDS, lambda: self._give_up(worker))
        self.world.after(seconds, lambda: self._thaw(worker))

    def _thaw(self, worker: SimulatedWorker) -> None:
        worker.thaw()
        for router in self.routers:  # which never stop looking for it
            router.watch(worker.worker_id)

    def _give_up(self, worker: SimulatedWorker) -> None:
        if worker.frozen:
            for stream in list(worker.streams.values()):
                stream.cut("it does not answer")

    def _cut_stream(self) -> None:
        worker = self._some_worker()
        if worker is not None and worker.streams:
            stream = self.world.random.choice(list(worker.streams.values()))
            self.world.log(worker.agent, f"stream to {stream.router.name} CUT")
            stream.cut("the connection broke")

    def _cut_fabric(self) -> None:
        if pair := self._some_pair():
            one, other = pair
            self.world.log(one.agent, f"connection to {other.agent} CUT")
            self.counts["cuts"] += 1
            self.fabric.cut(self._end_of(one), self._end_of(other))

    def _cut_and_freeze(self) -> None:
        """A connection breaks, and one side finds out much later than the other."""
        pair = self._some_pair()
        if pair and not pair[1].frozen:
            self.fabric.cut(self._end_of(pair[0]), self._end_of(pair[1]))
            self._freeze(pair[1])

    def _fail_fabric(self) -> None:
        """One can no longer answer the other, which can still write."""
        if pair := self._some_pair():
            one, other = self.world.random.sample(pair, 2)
            self.world.log(other.agent, f"connection to {one.agent} FAILED")
            self.counts["one-sided failures"] += 1
            self.fabric.fail(self._end_of(other), self._end_of(one))

    def _fail_and_kill(self) -> None:
        """A worker dies that another cannot reach anyway: only routers can tell of its death."""
        if pair := self._some_pair():
            one, other = self.world.random.sample(pair, 2)
            self.fabric.fail(self._end_of(other), self._end_of(one))
            self.world.after(self.world.random.random(), lambda: self._kill(one))

    def _stall_fabric(self) -> None:
        if pair := self._some_pair():
            one, other = pair
            self.world.log(one.agent, f"connection to {other.agent} STALLED")
            self.counts["stalls"] += 1
            seconds = self.world.random.choice((0.5, 2.0, 8.0, 25.0))
            self.fabric.stall(self._end_of(one), self._end_of(other), seconds)

    def _stall_and_kill(self) -> None:
        """What a worker had sent before it died arrives when its successor is long there."""
        if pair := self._some_pair():
            one, other = self.world.random.sample(pair, 2)
            self.world.log(one.agent, f"connection to {other.agent} STALLED")
            self.counts["stalls"] += 1
            self.fabric.stall(self._end_of(one), self._end_of(other), 12.0)
            self.world.after(self.world.random.random() * 0.1, lambda: self._kill(one))

    def _end_of(self, worker: SimulatedWorker) -> SimulatedTransport:
        """The end of some connection of its."""
        if not self.split:
            return worker.transport
        return self.world.random.choice(worker.transports)

    def _kill_rank(self) -> None:
        """A process of a worker dies; the worker finds out when it looks, and follows."""
        worker = self._some_worker()
        if worker is not None and not worker.transports[-1].dead:
            self.world.log(worker.agent, "a process KILLED")
            self.counts["processes killed"] += 1
            self.fabric.kill(worker.transports[-1])
            self.world.after(self.world.random.random() * 0.1, lambda: self._kill(worker))

    def _some_pair(self) -> tuple[SimulatedWorker, SimulatedWorker] | None:
        pairs = [
            (one, other)
            for one in self.workers.values()
            for other in self.workers.values()
            if (one.kind, other.kind) == (Role.PREFILL, Role.DECODE)
        ]
        return self.world.random.choice(pairs) if pairs else None

    def _cancel(self) -> None:
        live = [
            (router, request)
            for router in self.routers
            for request in router.requests.values()
            if not request.outcome
        ]
        if live:
            router, request = self.world.random.choice(live)
            router.cancel(request)

    def _kill_router(self) -> None:
        router = self.world.random.choice(self.routers)
        self.world.log(router.name, "KILLED")
        router.die()

    # What must hold.

    def _check_landing(self, write: Write) -> None:
        """Bytes may only change in pages that are held for this very attempt."""
        sender, receiver = (
            self.processes[transport.agent] for transport in (write.sender, write.endpoint.peer)
        )
        key = sender.push_of(write)
        expected = receiver.transfer._reservations._expected.get(key)
        self.world.log(sender.agent, f"{key} lands in {write.remote_pages} of {receiver.agent}")
        if expected is None or expected.sender != sender.agent:
            raise Violation(f"{key} writes to {receiver.agent}, which does not expect it")
        if expected.receiver.state not in (State.OPEN, State.QUARANTINED):
            raise Violation(f"{key} writes into a reservation that is {expected.receiver.state}")
        lease = _expected_in(receiver, key)
        if lease is None or lease.released or not set(write.remote_pages) <= set(lease.pages):
            raise Violation(f"{key} writes into pages of {receiver.agent} that it does not hold")
        pool = receiver.engine.pool
        for page in write.remote_pages:
            if pool.cache.knows(page) or pool._holders[page] != 1:
                raise Violation(f"{key} writes into page {page}, which others may read")
        if expected.receiver.state is State.QUARANTINED:
            what = "fetched" if receiver.kind is Role.PREFILL else "pushed"
            self.counts["writes into quarantine"] += 1
            self.counts[f"{what} into quarantine"] += 1
        self._check_source(sender, key, write)

    def _check_source(self, sender: SimulatedWorker, key: AttemptKey, write: Write) -> None:
        lease = _sent_from(sender, key)
        if lease is None or lease.released or not set(write.local_pages) <= set(lease.pages):
            raise Violation(f"{key} reads pages of {sender.agent} that it does not hold")

    def _check_rest(self) -> None:
        for router in self.routers:
            for request in router.requests.values():
                if not request.outcome:
                    raise Violation(f"{request.name} never ended")
                if request.outcome == Internal.reason and request.name not in self.breaks_at:
                    raise Violation(f"{request.name} failed with another request")
                self.counts[request.outcome] += 1
                self.counts["retries"] += max(len(request.life.placements) - 1, 0)
                if not self.faults:
                    self._check_undisturbed(request)
        for worker in self.workers.values():
            self._check_idle(worker)
        self._check_caches()

    def _check_caches(self) -> None:
        """Equal keys mean equal contents, on every worker that ever was."""
        contents: dict[bytes, list[int]] = {}
        for worker in dict.fromkeys(self.processes.values()):
            cache = worker.engine.pool.cache
            self.counts["pages found"] += cache.found
            self.counts["evictions"] += cache.evictions
            tier = worker.engine.pool.second_tier
            if tier is not None:
                self.counts["pages restored"] += tier.counts[Tier.HOST].restored
            for key in cache.keys:
                (page,) = cache.find([key])
                if (
                    contents.setdefault(key, worker.engine.memory[page])
                    != (worker.engine.memory[page])
                ):
                    raise Violation(f"page {page} of {worker.agent} is not what its key says")

    def _check_undisturbed(self, request: SimulatedRequest) -> None:
        if request.outcome != "finished":
            raise Violation(f"{request.name} failed without a fault: {request.outcome}")
        # Where both pools are full, the youngest prompt has to go and come back.
        reasons = [placement.reason for placement in request.life.placements[1:]]
        if any("pool is full" not in reason for reason in reasons) and not self.fabric.damage:
            raise Violation(f"{request.name} was tried again without a fault: {reasons}")

    def _check_idle(self, worker: SimulatedWorker) -> None:
        pool, transfer, role = worker.engine.pool, worker.transfer, worker.role
        held = {
            "pages": pool.leased,
            "requests": len(role._jobs),
            "quarantines": len(role._leaving) if isinstance(role, DecodeRole) else 0,
            "loans": len(role._loans._loans) if isinstance(role, DecodeRole) else 0,
            "fetches": len(role._fetches._fetches) if isinstance(role, PrefillRole) else 0,
            "pushes": len(transfer._pushes._senders),
            "writes": len(transfer._pushes._writes)
            + sum(len(transport.writes) for transport in worker.transports),
            "reservations": len(transfer._reservations._expected),
            "waiting": role._scheduler.waiting + role._scheduler.running,
        }
        left = {what: count for what, count in held.items() if count}
        if left or pool.check_integrity(held=0):
            raise Violation(f"{worker.agent} at rest still holds {left}; {pool.check_integrity()}")


def _expected_in(worker: SimulatedWorker, key: AttemptKey) -> Lease | None:
    """The pages that wait for an attempt's to arrive: a prompt's, or those that are fetched."""
    if isinstance(worker.role, PrefillRole):
        fetch = worker.role._fetches._fetches.get(key)
        return fetch.lease if fetch else None
    travelling = worker.role._scheduler._travelling.get(key)
    return travelling.lease if travelling else worker.role._leaving.get(key)


def _sent_from(worker: SimulatedWorker, key: AttemptKey) -> Lease | None:
    """The pages that an attempt's push reads."""
    if isinstance(worker.role, DecodeRole):
        return worker.role._loans._loans.get(key)
    job = worker.role._jobs.get(key)
    return job.lease if job else None


def _next_turn(work: Work, prompt: list[int]) -> list[int]:
    """What a client asks that has had the answer to `work`."""
    return [*work.prompt_tokens, *reference(work), *prompt]


def _begun_alike(tokens: list[int]) -> list[int]:
    """A prompt that shares a part of random length with others, and goes on by itself."""
    differs = (place for place, token in enumerate(tokens) if token > 0.85 * VOCABULARY)
    shared = next(differs, len(tokens))
    return [place * 7 % VOCABULARY for place in range(shared)] + tokens[shared:]
