"""A phase: prefill or decode, run on top of an engine by a worker's engine thread.

All methods run on the engine thread, one at a time, and none of them blocks.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from baton.core import bounds
from baton.core.config import Config
from baton.core.errors import (
    BatonError,
    Internal,
    NotServed,
    PromptTooLong,
    QuarantineFull,
    WorkerDrained,
)
from baton.core.types import AttemptKey, Pooling, Role, Work
from baton.core.wire import failed_to, work_from
from baton.engine.engine import AnyAdapterPool, Engine
from baton.engine.sequence import Sequence
from baton.engine.step import Plan
from baton.kv_transfer.transfer_events import (
    PagesDamaged,
    SenderDied,
    TransferCrashed,
    TransferEvent,
)
from baton.kv_transfer.transfer_thread import TransferThread
from baton.v1 import worker_pb2 as pb
from baton.worker.held_leases import HeldLeases
from baton.worker.metrics import WorkerMetrics
from baton.worker.outbox import Outbox
from baton.worker.step_pipeline import Settled, StepPipeline
from baton.worker.step_record import StepRecord

Order = pb.Prefill | pb.Reserve | pb.Compute
"""A message that carries work."""


class Scheduler(Protocol):
    held: bool

    @property
    def waiting(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def background(self) -> int: ...

    @property
    def paused(self) -> int: ...

    @property
    def queued_tokens(self) -> int: ...


@dataclass(slots=True, eq=False)
class Job(Sequence):
    """One attempt: its sequence, with the fields that both phases need."""

    attachment: int = 0
    queued_at: float = 0.0
    started_at: float = 0.0  # when it was first in a step


AnyJob = TypeVar("AnyJob", bound=Job)


class Phase(ABC, Generic[AnyJob]):
    """Holds one job per attempt. If a peer may still use a released job's pages, its lease moves
    to `_leaving`."""

    role: ClassVar[Role]
    _scheduler: Scheduler
    accepted: ClassVar[tuple[str, ...]]  # kinds of orders for this role

    def __init__(
        self,
        engine: Engine,
        transfer: TransferThread,
        outbox: Outbox,
        metrics: WorkerMetrics,
        config: Config,
        record: StepRecord,
    ) -> None:
        self._engine = engine
        self._pool = engine.pool
        self._adapters = engine.adapters
        self._transfer = transfer
        self._outbox = outbox
        self._metrics = metrics
        self._steps = StepPipeline(engine, metrics, record)
        self._quarantine_share = config.quarantine_share
        self._draining = False
        self._jobs: dict[AttemptKey, AnyJob] = {}
        self._alone: set[AttemptKey] = set()  # jobs that share no step with others
        self._holding: set[int] = set()  # routers that hold background requests
        self._leaving = HeldLeases(written=self.role is Role.DECODE)
        self._held = [self._leaving]
        self._set_up(config)

    @abstractmethod
    def _set_up(self, config: Config) -> None:
        """Creates the parts that only this phase has."""

    def on_message(self, attachment: int, message: pb.RouterMessage, arrived: float) -> None:
        """Handles a router's message. `arrived` is its arrival time by the monotonic clock."""
        match message.WhichOneof("kind"):
            case "prefill" | "reserve" | "compute" as kind:
                order: Order = getattr(message, kind)
                if kind in self.accepted:
                    with self._steps.record.accepting(order.work.request_id):
                        self._accept(attachment, order, arrived)
                else:
                    self._refuse(attachment, order.work)
            case "release":
                self._release(AttemptKey(message.release.request_id, message.release.epoch))
            case "sender_gone":
                self._transfer.post(SenderDied(message.sender_gone.agent))
            case "hold":
                self._hold(attachment, pause=message.hold.pause)

    def on_detach(self, attachment: int) -> None:
        """Releases everything that a disconnected router's requests hold."""
        for key in [key for key, job in self._jobs.items() if job.attachment == attachment]:
            self._release(key)
        self._hold(attachment, pause=False)

    def _hold(self, attachment: int, *, pause: bool) -> None:
        (self._holding.add if pause else self._holding.discard)(attachment)
        self._scheduler.held = bool(self._holding)

    def on_transfer(self, event: TransferEvent) -> None:
        """Handles an event of the transfer thread."""
        match event:
            case PagesDamaged():
                self._metrics.damaged(event.count)
            case TransferCrashed():
                raise Internal(f"the transfer thread stopped: {event.reason}")
            case _:
                self._on_transfer(event)

    def step(self) -> bool:
        """Runs one step of the engine. Returns False if nothing can run."""
        self._pool.second_tier.advance()
        if self._alone:
            self._alone &= self._jobs.keys()
            self._advance({})  # settles all steps in flight, so that none runs beside theirs
        plan = self._plan()
        if self._adapters:
            plan = self._with_adapters(self._adapters, plan)
        if not plan and not self._steps.any:
            return self._unblock()
        self._start(plan)
        if self._alone:
            plan = self._run_alone(plan)
        self._advance(plan)
        return True

    def _run_alone(self, plan: Plan) -> Plan:
        """Runs attempts that share no step, one after the other; returns the rest of the plan."""
        alone = [sequence for sequence in plan if sequence.work.key in self._alone]
        for sequence in alone:
            self._advance({sequence: plan[sequence]})
            self._advance({})
        return {each: count for each, count in plan.items() if each not in alone}

    def _advance(self, plan: Plan) -> None:
        for settled in self._steps.advance(plan):
            self._settle(settled)
        self._end_step(plan)

    def _with_adapters(self, adapters: AnyAdapterPool, plan: Plan) -> Plan:
        """The plan without jobs that wait for their adapters, or whose adapters failed to load."""
        for digest, error in adapters.settle().items():
            for job in [each for each in self._jobs.values() if each.work.adapter_digest == digest]:
                plan.pop(job, None)
                self._fail(job, error)
        return adapters.runnable(plan)

    def load(self) -> pb.Load:
        """Reports how busy the phase and its pool are, also to the metrics."""
        busy, quarantined = self._jobs or self._steps.any, self._quarantined
        held = set[int]().union(*(each.pages for each in self._held))
        leak = "" if busy else self._pool.check_integrity(held=len(held))
        load = pb.Load(
            free_pages=self._pool.free,
            leased_pages=self._pool.leased - quarantined,
            quarantined_pages=quarantined,
            cached_pages=self._pool.cached,
            kept_pages=len(self._pool.second_tier),
            waiting=self._scheduler.waiting,
            running=self._scheduler.running,
            background=self._scheduler.background,
            paused=self._scheduler.paused,
            queued_tokens=self._scheduler.queued_tokens,
            fault=leak or self._quarantine_fault(quarantined),
            transfers=self._transfers,
            adapters=self._adapters.loaded if self._adapters else (),
        )
        self._metrics.load(load)
        self._metrics.cache(self._pool)
        if self._adapters:
            self._metrics.adapters(self._adapters.events)
        return load

    def drain(self) -> None:
        """Refuses new requests from now on; routers retry them on another worker."""
        self._draining = True

    def resume(self) -> None:
        """Accepts new requests again."""
        self._draining = False

    def hand_back(self) -> None:
        """Fails every request; routers retry them on another worker."""
        for job in list(self._jobs.values()):
            self._fail(job, self._drained())

    @property
    def idle(self) -> bool:
        """True if there are no requests."""
        return not self._jobs

    @property
    def settled(self) -> bool:
        """True if there are no requests, no in-flight steps and no transfers of any page."""
        return self.idle and not self._steps.any and not any(map(len, self._held))

    @abstractmethod
    def _on_transfer(self, event: TransferEvent) -> None: ...

    @abstractmethod
    def _begin(self, work: Work, order: Order) -> AnyJob:
        """Queues the job of an accepted order."""

    @abstractmethod
    def _plan(self) -> Plan: ...

    def _unblock(self) -> bool:
        """Called when nothing can run. Returns True if something can now."""
        return False

    @abstractmethod
    def _commit(self, job: AnyJob, settled: Settled) -> None:
        """Applies a step's results to a job."""

    @abstractmethod
    def _end_step(self, plan: Plan) -> None:
        """Called when the plan's step is launched and those before it are committed."""

    @abstractmethod
    def _release(self, key: AttemptKey) -> None:
        """Ends an attempt, if it is known, and frees its pages once that is safe."""

    @property
    @abstractmethod
    def _transfers(self) -> int:
        """Number of attempts whose pages may be in transfer."""

    @property
    def _quarantined(self) -> int:
        """Number of pages that peers have held for too long."""
        return len(set[int]().union(*(each.overdue_pages for each in self._held)))

    def _accept(self, attachment: int, order: Order, arrived: float) -> None:
        key = AttemptKey(order.work.request_id, order.work.epoch)
        if key in self._jobs or key in self._leaving:
            return
        try:
            work = work_from(order.work)
            self._check(work)
        except BatonError as error:
            self._outbox.send(attachment, failed_to(key, error))
            return
        if work.alone:
            self._alone.add(work.key)
        job = self._jobs[work.key] = self._begin(work, order)
        job.attachment, job.queued_at = attachment, arrived
        job.set_guide(self._engine.guide(work))
        if self._adapters and work.adapter:
            in_use = {each.work.adapter_digest for each in self._jobs.values()}
            self._adapters.request(work.adapter, in_use)

    def _start(self, plan: Plan) -> list[AnyJob]:
        """Notes the start of jobs in their first step and returns these jobs."""
        now = time.monotonic()
        jobs = [self._jobs[sequence.work.key] for sequence in plan]
        new = [job for job in jobs if not job.started_at]
        for job in new:
            job.started_at = now
            self._metrics.queued(now - job.queued_at)
        return new

    def _settle(self, settled: Settled) -> None:
        job = self._jobs.get(settled.sequence.work.key)
        if job is None or job is not settled.sequence:
            return  # released while its step was in flight
        if settled.error is not None:
            job.lease.forget()
            self._fail(job, settled.error)
        else:
            self._commit(job, settled)

    def _fail(self, job: AnyJob, error: BatonError, *, retry: bool = False) -> None:
        self._outbox.send(job.attachment, failed_to(job.work.key, error, retry=retry))
        self._release(job.work.key)

    def _check(self, work: Work) -> None:
        """Raises an error if the work cannot be accepted."""
        if self._draining:
            raise self._drained()
        if fault := self._quarantine_fault(self._quarantined):
            raise QuarantineFull(fault)
        vocabulary, context = self._limits(work)
        bounds.check_work(work, vocabulary)
        if work.adapter:
            if self._adapters is None:
                raise NotServed("this worker serves no adapters", field="model")
            self._adapters.check(work.adapter)
        answer = work.tokens_wanted if self.role is Role.DECODE else 0
        most_tokens = len(work.prompt_tokens) + answer
        if most_tokens > context:
            raise PromptTooLong(
                f"the request may reach {most_tokens} tokens; this worker's context holds"
                f" {context}",
                field="prompt",
            )

    def _limits(self, work: Work) -> tuple[int, int]:
        """The vocabulary and the context of the work's model."""
        if work.pooling is not Pooling.ENCODER:
            return self._engine.architecture.vocabulary_size, self._engine.context_length
        if self._engine.encoder is None or self.role is Role.DECODE:
            raise NotServed("this worker runs no embedding model", field="model")
        config = self._engine.encoder.config
        return config.vocabulary, config.max_tokens

    def _drained(self) -> WorkerDrained:
        return WorkerDrained(f"the {self.role.value} worker is being drained")

    def _refuse(self, attachment: int, work: pb.Work) -> None:
        """Fails a request for the other role, from a router that does not know of the role
        switch yet."""
        error = WorkerDrained(f"the worker's role has changed to {self.role.value}")
        key = AttemptKey(work.request_id, work.epoch)
        self._outbox.send(attachment, failed_to(key, error))

    def _quarantine_fault(self, quarantined: int) -> str:
        """Returns why the worker refuses new requests, "" if it accepts them.

        Pages that a remote write may still reach cannot be used. When they exceed the configured
        share of the pool, something is badly wrong with the peers, and few requests would fit.
        """
        share, total = self._quarantine_share, self._pool.total
        if quarantined <= share * total:
            return ""
        return f"{quarantined} of {total} pages are in quarantine, more than {share:.0%}"


AnyPhase = Phase[Any]
