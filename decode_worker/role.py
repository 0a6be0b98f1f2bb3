"""The decode phase: hold pages for prompts on their way, then write answers.

The life of one attempt:

    Reserve ─▶ waiting ─▶ travelling ─Landed─▶ running ─▶ last token, pages freed
                  │           │                   │
               Release     Release             Release ─▶ pages freed
                  │           │
              forgotten       └─▶ leaving: the sender may still write; the
                                  pages are freed when the transfer thread
                                  says that no write can reach them
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

from baton.v1 import worker_pb2 as pb
from core.config import Config
from core.errors import BatonError, Exhausted, Internal
from core.types import AttemptKey, Work
from core.wire import failed_to, finish_to, work_from
from decode_worker.scheduler import DecodeScheduler, Reservation
from engine.engine import Engine
from engine.page_pool import Lease
from engine.sequence import Piece, Sequence
from kv_transfer.events import (
    Landed,
    ReservationFailed,
    ReservationFreed,
    TransferCrashed,
    TransferEvent,
)
from kv_transfer.thread import TransferThread
from kv_transfer.ticket import make_ticket
from worker.admission import check_work
from worker.metrics import WorkerMetrics
from worker.outbox import Outbox
from worker.run_plan import run_plan


@dataclass(slots=True)
class Job:
    attachment: int
    work: Work
    sender: str  # the transport agent that will push the pages
    arrived: float
    landed: float = 0.0
    sequence: Sequence | None = None
    queue_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Leaving:
    """Pages of a released reservation that its sender may still write to."""

    lease: Lease
    sender: str


class DecodeRole:
    def __init__(
        self,
        engine: Engine,
        transfer: TransferThread,
        outbox: Outbox,
        metrics: WorkerMetrics,
        config: Config,
    ) -> None:
        self._engine = engine
        self._pool = engine.pool
        self._transfer = transfer
        self._outbox = outbox
        self._metrics = metrics
        self._scheduler = DecodeScheduler(
            engine.pool, config.decode.max_batch, config.decode.chunk_tokens
        )
        self._ticket_seconds = config.decode.ticket_seconds
        self._jobs: dict[AttemptKey, Job] = {}
        self._leaving: dict[AttemptKey, Leaving] = {}

    def on_message(self, attachment: int, message: pb.RouterMessage) -> None:
        match message.WhichOneof("kind"):
            case "reserve":
                self._accept(attachment, message.reserve)
            case "release":
                release = message.release
                key = AttemptKey(release.request_id, release.epoch)
                self._release(key, undelivered=release.undelivered)
            case "sender_gone":
                self._sender_gone(message.sender_gone.agent)

    def on_detach(self, attachment: int) -> None:
        for key in [key for key, job in self._jobs.items() if job.attachment == attachment]:
            self._release(key, undelivered=False)

    def on_transfer(self, event: TransferEvent) -> None:
        match event:
            case Landed():
                self._land(event)
            case ReservationFreed():
                self._let_go(event.key)
            case ReservationFailed() if event.key in self._jobs:
                self._fail(self._jobs[event.key], event.error)
            case TransferCrashed():
                raise Internal(f"the transfer thread stopped: {event.reason}")

    def step(self) -> bool:
        self._grant()
        plan = self._scheduler.next()
        if not plan:
            return False
        began = time.monotonic()
        self._admit(plan, began)
        outcomes = run_plan(self._engine, plan)
        self._metrics.step(len(plan), sum(piece.count for piece in plan), time.monotonic() - began)
        steps: defaultdict[int, list[pb.StepTokens]] = defaultdict(list)
        for piece, outcome in zip(plan, outcomes, strict=True):
            self._commit(piece.sequence, outcome, steps)
        for attachment, tokens in steps.items():
            self._outbox.send(attachment, pb.WorkerMessage(step=pb.Step(tokens=tokens)))
        return True

    def load(self) -> pb.Load:
        leaving = sum(len(item.lease) for item in self._leaving.values())
        load = pb.Load(
            free_pages=self._pool.free,
            leased_pages=self._pool.leased - leaving,
            quarantined_pages=leaving,
            waiting=self._scheduler.waiting,
            running=self._scheduler.running,
            fault=self._pool.check_integrity(held=leaving) if not self._jobs else "",
        )
        self._metrics.load(load)
        return load

    def _accept(self, attachment: int, message: pb.Reserve) -> None:
        work = work_from(message.work)
        if work.key in self._jobs or work.key in self._leaving:
            return
        try:
            self._check(work)
        except BatonError as error:
            self._outbox.send(attachment, failed_to(work.key, error))
            return
        self._jobs[work.key] = Job(attachment, work, message.sender, time.monotonic())
        self._scheduler.reserve(work)

    def _check(self, work: Work) -> None:
        check_work(work, self._engine.architecture.vocabulary_size)
        wanted = self._pool.pages_for(len(work.prompt_tokens) + work.max_tokens)
        if wanted > self._pool.total:
            raise Exhausted(f"the request needs {wanted} pages; the pool has {self._pool.total}")

    def _grant(self) -> None:
        for reservation in self._scheduler.grant():
            self._send_ticket(self._jobs[reservation.work.key], reservation)

    def _send_ticket(self, job: Job, reservation: Reservation) -> None:
        key = job.work.key
        self._transfer.expect(key, len(reservation.lease), self._ticket_seconds)
        ticket = make_ticket(
            key,
            agent=self._transfer.pool_address.agent,
            pages=reservation.lease.pages,
            expires_after_seconds=self._ticket_seconds,
            layout=self._transfer.pool_address.layout,
        )
        reserved = pb.Reserved(
            request_id=key.request_id,
            epoch=key.epoch,
            ticket=ticket,
            queue_seconds=time.monotonic() - job.arrived,
        )
        self._outbox.send(job.attachment, pb.WorkerMessage(reserved=reserved))

    def _land(self, event: Landed) -> None:
        if event.key in self._leaving:
            self._let_go(event.key)
            return
        job = self._jobs.get(event.key)
        if job is not None:
            job.sequence = self._scheduler.arrive(event.key, event.first_token)
            job.landed = time.monotonic()

    def _admit(self, plan: list[Piece], now: float) -> None:
        for piece in plan:
            job = self._jobs[piece.sequence.work.key]
            if not job.queue_seconds:
                job.queue_seconds = now - job.landed
                self._metrics.queued(job.queue_seconds)

    def _commit(
        self,
        sequence: Sequence,
        outcome: int | BatonError | None,
        steps: defaultdict[int, list[pb.StepTokens]],
    ) -> None:
        job = self._jobs[sequence.work.key]
        if isinstance(outcome, BatonError):
            self._fail(job, outcome)
        elif outcome is not None:
            finish = sequence.append(outcome)
            steps[job.attachment].append(
                pb.StepTokens(
                    request_id=job.work.key.request_id,
                    epoch=job.work.key.epoch,
                    token_ids=[outcome],
                    finish_reason=finish_to(finish),
                    queue_seconds=job.queue_seconds if sequence.generated == 2 else 0.0,
                )
            )
            if finish:
                self._scheduler.finish(sequence)
                del self._jobs[job.work.key]

    def _fail(self, job: Job, error: BatonError) -> None:
        self._outbox.send(job.attachment, failed_to(job.work.key, error))
        self._release(job.work.key, undelivered=False)

    def _release(self, key: AttemptKey, *, undelivered: bool) -> None:
        job = self._jobs.pop(key, None)
        if job is None:
            return
        if job.sequence is not None:
            self._scheduler.finish(job.sequence)
            return
        reservation = self._scheduler.withdraw(key)
        if reservation is not None:
            self._leaving[key] = Leaving(reservation.lease, job.sender)
            self._transfer.release_reservation(key, undelivered=undelivered)

    def _let_go(self, key: AttemptKey) -> None:
        leaving = self._leaving.pop(key, None)
        if leaving is not None:
            leaving.lease.release()

    def _sender_gone(self, agent: str) -> None:
        senders = {key: job.sender for key, job in self._jobs.items()}
        senders |= {key: leaving.sender for key, leaving in self._leaving.items()}
        for key in [key for key, sender in senders.items() if sender == agent]:
            self._transfer.sender_died(key)
