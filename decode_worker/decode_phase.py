"""The decode phase: reserve pages for prompts, then compute their answers.

The life of one attempt:

    Reserve ─▶ waiting ─▶ travelling ─Arrived─▶ running ─▶ last token, pages freed
                  │           │                   │
               Release     Release             Release ─▶ pages freed
                  │           │
              forgotten       └─▶ leaving: the sender may still write; the
                                  pages are freed when the transfer thread
                                  reports that no write can reach them

    Compute ─▶ running, with local prefill: no pages are pushed

Prefill workers may also fetch cached pages (`Loans`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

from baton.core.config import Config
from baton.core.errors import BatonError
from baton.core.types import AttemptKey, FinishReason, Role, Work
from baton.core.wire import failed_to, finish_to, logprobs_to, work_from
from baton.decode_worker.decode_scheduler import DecodeScheduler, Reservation
from baton.engine.engine import Engine
from baton.engine.page_pool import Lease, PagePool
from baton.engine.sequence import Guide, Sequence
from baton.engine.step import Chunk
from baton.kv_transfer.transfer_events import (
    Arrived,
    DeliverTicket,
    ExpectPages,
    LendPages,
    PagesWanted,
    PushEnded,
    PushOverdue,
    ReleaseReservation,
    ReservationFailed,
    ReservationFreed,
    ReservationOverdue,
    SenderDied,
    TransferEvent,
)
from baton.kv_transfer.transfer_protocol import make_ticket
from baton.kv_transfer.transfer_thread import TransferThread
from baton.v1 import worker_pb2 as pb
from baton.worker.metrics import WorkerMetrics
from baton.worker.outbox import Outbox
from baton.worker.phase import Phase
from baton.worker.step_pipeline import Settled

MOST_LOANS = 16
"""Loans at once."""


@dataclass(slots=True)
class DecodeJob:
    attachment: int
    work: Work
    sender: str  # the transport agent that will push the pages
    arrived: float
    pages_arrived: float = 0.0
    sequence: Sequence | None = None
    queue_seconds: float = 0.0
    admitted: float = 0.0  # when it was first in a batch
    decoding: bool = False  # a token has been sent
    guide: Guide | None = None


class DecodePhase(Phase[DecodeJob]):
    role = Role.DECODE

    def __init__(
        self,
        engine: Engine,
        transfer: TransferThread,
        outbox: Outbox,
        metrics: WorkerMetrics,
        config: Config,
    ) -> None:
        super().__init__(engine, transfer, outbox, metrics, config)
        self._scheduler = DecodeScheduler(
            engine.pool, config.decode.max_batch, config.decode.chunk_tokens
        )
        self._loans = Loans(engine.pool, transfer)
        self._ticket_seconds = config.decode.ticket_seconds
        # Pages of released reservations that their senders may still write to.
        self._leaving: dict[AttemptKey, Lease] = {}
        self._overdue: set[AttemptKey] = set()  # those that stay for too long

    @property
    def settled(self) -> bool:
        transfers = self._leaving or self._loans.pages
        return self.idle and not self._steps.any and not transfers

    def on_message(self, attachment: int, message: pb.RouterMessage, arrived: float) -> None:
        match message.WhichOneof("kind"):
            case "reserve":
                self._accept(attachment, message.reserve, arrived)
            case "compute":
                self._accept(attachment, message.compute, arrived)
            case "release":
                self._release(AttemptKey(message.release.request_id, message.release.epoch))
            case "sender_gone":
                self._transfer.post(SenderDied(message.sender_gone.agent))
            case "prefill":
                self._refuse(attachment, message.prefill.work)

    def hand_back(self) -> None:
        for job in list(self._jobs.values()):
            self._fail(job, self._drained())

    def _on_transfer(self, event: TransferEvent) -> None:
        match event:
            case Arrived():
                self._arrive(event)
            case ReservationFreed():
                self._free(event.key)
            case ReservationOverdue() if event.key in self._leaving:
                self._overdue.add(event.key)
            case PagesWanted():
                self._loans.answer(event)
            case PushOverdue():
                self._loans.mark_overdue(event.key)
            case PushEnded():
                self._loans.end(event.key)
            case ReservationFailed() if event.key in self._jobs:
                self._lose(self._jobs[event.key], event.error)

    def step(self) -> bool:
        self._pool.lower.advance()
        self._grant()
        plan = self._scheduler.next()
        if not plan and not self._steps.any:
            return False
        self._admit(plan, time.monotonic())
        steps: defaultdict[int, list[pb.StepTokens]] = defaultdict(list)
        for settled in self._steps.advance(plan):
            self._commit(settled, steps)
        for attachment, tokens in steps.items():
            self._outbox.send(attachment, pb.WorkerMessage(step=pb.Step(tokens=tokens)))
        return True

    def load(self) -> pb.Load:
        held = len(self._leaving_pages | self._loans.pages)
        load = self._measure_load(self._scheduler, held, self._scheduler.travelling)
        load.prefilling = self._scheduler.prefilling
        return load

    @property
    def _quarantined(self) -> int:
        leases = (self._leaving[key] for key in self._overdue)
        reserved = sum(len(lease) - lease.found for lease in leases)
        return reserved + len(self._loans.overdue_pages)

    @property
    def _leaving_pages(self) -> set[int]:
        return {page for lease in self._leaving.values() for page in lease.pages}

    def _accept(self, attachment: int, message: pb.Reserve | pb.Compute, arrived: float) -> None:
        work = work_from(message.work)
        if work.key in self._jobs or work.key in self._leaving:
            return
        try:
            self._check(work, len(work.prompt_tokens) + work.tokens_wanted)
        except BatonError as error:
            self._outbox.send(attachment, failed_to(work.key, error))
            return
        guide = self._engine.guide(work)
        if isinstance(message, pb.Reserve):
            self._jobs[work.key] = DecodeJob(attachment, work, message.sender, arrived, guide=guide)
            self._scheduler.reserve(work)
        else:
            sequence = self._scheduler.compute(work)
            sequence.set_guide(guide)
            job = DecodeJob(attachment, work, "", arrived, pages_arrived=arrived, sequence=sequence)
            self._jobs[work.key] = job

    def _grant(self) -> None:
        for reservation in self._scheduler.grant():
            self._send_ticket(self._jobs[reservation.work.key], reservation)

    def _send_ticket(self, job: DecodeJob, reservation: Reservation) -> None:
        key = job.work.key
        lease, pages = reservation.lease, reservation.awaited
        self._transfer.post(ExpectPages(key, job.sender, pages, self._ticket_seconds))
        ticket = make_ticket(
            key,
            agent=self._transfer.pool_address.agent,
            held_pages=lease.found,
            pages=pages,
            expires_after_seconds=self._ticket_seconds,
            lease_seconds=self._transfer.lease_seconds,
            layout=self._transfer.pool_address.layout,
        )
        reserved = pb.Reserved(
            request_id=key.request_id,
            epoch=key.epoch,
            ticket=ticket,
            queue_seconds=time.monotonic() - job.arrived,
            cached_tokens=lease.found * self._pool.page_size,
        )
        self._outbox.send(job.attachment, pb.WorkerMessage(reserved=reserved))

    def _arrive(self, event: Arrived) -> None:
        if event.key in self._leaving:
            self._free(event.key)
            return
        job = self._jobs.get(event.key)
        if job is not None:
            job.sequence = self._scheduler.arrive(event.key, event.first_token)
            job.pages_arrived = time.monotonic()
            if job.sequence is not None:
                job.sequence.set_guide(job.guide)

    def _admit(self, plan: list[Chunk], now: float) -> None:
        for piece in plan:
            job = self._jobs[piece.sequence.work.key]
            if not job.admitted:
                job.admitted = now
                job.queue_seconds = now - job.pages_arrived
                self._metrics.queued(job.queue_seconds)

    def _commit(self, settled: Settled, steps: defaultdict[int, list[pb.StepTokens]]) -> None:
        sequence, outcome = settled.sequence, settled.outcome
        job = self._jobs.get(sequence.work.key)
        if job is None or job.sequence is not sequence:
            return  # released while its step was in flight
        if isinstance(outcome, BatonError):
            sequence.lease.forget()
            self._fail(job, outcome)
            return
        sequence.settle(settled.computed)
        if outcome is not None:
            finish = sequence.append(outcome)
            steps[job.attachment].append(self._step_tokens(job, settled, finish))
            job.decoding = True
            if finish:
                self._scheduler.finish(sequence)
                del self._jobs[job.work.key]

    def _step_tokens(
        self, job: DecodeJob, settled: Settled, finish: FinishReason | None
    ) -> pb.StepTokens:
        """Its last token; with the first one, the times until then."""
        sequence = settled.sequence
        message = pb.StepTokens(
            request_id=job.work.key.request_id,
            epoch=job.work.key.epoch,
            token_ids=sequence.tokens[-1:],
            finish_reason=finish_to(finish),
            logprobs=[logprobs_to(settled.logprobs)] if settled.logprobs else (),
        )
        if not job.decoding:
            message.queue_seconds = job.queue_seconds
            message.compute_seconds = time.monotonic() - job.admitted
            if not job.sender:  # the prompt was computed here
                message.cached_tokens = sequence.cached_tokens
                message.restored_tokens = sequence.restored_tokens
                message.prompt_logprobs.extend(map(logprobs_to, sequence.prompt_scores))
        return message

    def _fail(self, job: DecodeJob, error: BatonError) -> None:
        self._outbox.send(job.attachment, failed_to(job.work.key, error))
        self._release(job.work.key)

    def _lose(self, job: DecodeJob, error: BatonError | None) -> None:
        """A prompt will not arrive. Without an error prefill gave up and tells the router itself:
        token #1 was the last, or it failed. A message from here could overtake that."""
        if error is None:
            self._release(job.work.key)
        else:
            self._fail(job, error)

    def _release(self, key: AttemptKey) -> None:
        job = self._jobs.pop(key, None)
        if job is None:
            return
        if job.sequence is not None:
            self._scheduler.finish(job.sequence)
            return
        reservation = self._scheduler.withdraw(key)
        if reservation is not None:
            self._leaving[key] = reservation.lease
            self._transfer.post(ReleaseReservation(key))

    def _free(self, key: AttemptKey) -> None:
        self._overdue.discard(key)
        lease = self._leaving.pop(key, None)
        if lease is not None:
            lease.release()


class Loans:
    """Cached pages that are being pushed to a prefill worker which fetches them.

        PagesWanted ─▶ lent ─PushEnded─▶ back in the cache
             │
             └─ not cached, or too many loans ─▶ declined

    A loan is a lease, so lent pages are not evicted. It ends with its push.
    """

    def __init__(self, pool: PagePool, transfer: TransferThread) -> None:
        self._pool = pool
        self._transfer = transfer
        self._loans: dict[AttemptKey, Lease] = {}
        self._overdue: set[AttemptKey] = set()

    @property
    def pages(self) -> set[int]:
        return {page for lease in self._loans.values() for page in lease.pages}

    @property
    def overdue_pages(self) -> set[int]:
        """Pages that a cancelled write has been reading for too long."""
        return {page for key in self._overdue for page in self._loans[key].pages}

    def answer(self, wanted: PagesWanted) -> None:
        lease = self._pool.hold(wanted.page_keys if len(self._loans) < MOST_LOANS else ())
        if lease.pages:
            self._loans[wanted.key] = lease
            self._transfer.post(LendPages(wanted.key, wanted.peer, wanted.ticket, lease.pages))
        else:
            lease.release()
            self._transfer.post(DeliverTicket(wanted.key, wanted.ticket))

    def end(self, key: AttemptKey) -> None:
        self._overdue.discard(key)
        if lease := self._loans.pop(key, None):
            lease.release()

    def mark_overdue(self, key: AttemptKey) -> None:
        if key in self._loans:
            self._overdue.add(key)
