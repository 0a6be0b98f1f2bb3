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

import logging
import time
from collections import defaultdict
from dataclasses import dataclass

from baton.core.config import Config
from baton.core.errors import BatonError
from baton.core.types import AttemptKey, FinishReason, Logprobs, Role, Work
from baton.core.wire import finish_to, logprobs_to
from baton.decode_worker.decode_scheduler import DecodeScheduler
from baton.decode_worker.drafts import Drafts
from baton.decode_worker.speculation import Speculation
from baton.engine.page_pool import PagePool
from baton.engine.step import Plan, token_and_logprobs
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
    TransferEvent,
)
from baton.kv_transfer.transfer_thread import TransferThread
from baton.v1 import worker_pb2 as pb
from baton.worker.held_leases import HeldLeases
from baton.worker.phase import Job, Order, Phase
from baton.worker.step_pipeline import Settled

log = logging.getLogger(__name__)

MOST_LOANS = 16
"""Limit of simultaneous loans."""


@dataclass(slots=True, eq=False)
class DecodeSequence(Job):
    sender: str = ""  # the transport agent that will push the pages
    decoding: bool = False  # a token has been sent


class DecodePhase(Phase[DecodeSequence]):
    role = Role.DECODE
    accepted = ("reserve", "compute")

    def _set_up(self, config: Config) -> None:
        self._drafts = self._make_drafts(config)
        speculation = None
        if self._guesses_tokens(config):
            speculation = Speculation(self._drafts, runs_ahead=self._engine.runs_ahead)
        self._scheduler: DecodeScheduler = DecodeScheduler(
            self._pool,
            config.decode.max_batch,
            config.decode.chunk_tokens,
            speculation,
            config.decode.background_batch,
        )
        self._guessed = self._accepted = self._guessed_steps = 0
        self._drafted = (0.0, 0, 0)  # seconds, guesses and right ones, as last reported
        self._steps.on_step = speculation.note_step if speculation else None
        self._loans = Loans(self._pool, self._transfer)
        self._held.append(self._loans)
        self._ticket_seconds = config.decode.ticket_seconds
        self._step_tokens: defaultdict[int, list[pb.StepTokens]] = defaultdict(list)

    def _guesses_tokens(self, config: Config) -> bool:
        if config.speculation != "auto":
            return config.speculation != "off"
        if not self._engine.has_independent_rows:
            log.info("speculation is off: a token may depend on what else its step computes")
        return self._engine.has_independent_rows

    def _make_drafts(self, config: Config) -> Drafts | None:
        if config.speculation != "draft":
            return None
        assert self._engine.draft, "loaded with the phase"
        vocabulary = self._engine.architecture.vocabulary_size
        chunk_tokens = config.decode.chunk_tokens
        drafts = Drafts(self._engine.draft, vocabulary, chunk_tokens, self._steps.record)
        if self._engine.draft.runs_ahead:
            drafts.rehearse()
        return drafts

    def _on_transfer(self, event: TransferEvent) -> None:
        match event:
            case Arrived():
                self._arrive(event)
            case ReservationFreed():
                self._leaving.free(event.key)
            case ReservationOverdue():
                self._leaving.mark_overdue(event.key)
            case PagesWanted():
                self._loans.answer(event)
            case PushOverdue():
                self._loans.mark_overdue(event.key)
            case PushEnded():
                self._loans.free(event.key)
            case ReservationFailed() if event.key in self._jobs:
                self._lose(self._jobs[event.key], event.error)

    def load(self) -> pb.Load:
        load = super().load()
        load.prefilling = self._scheduler.prefilling
        load.guessed_tokens, load.accepted_tokens = self._guessed, self._accepted
        load.guessed_steps = self._guessed_steps
        if self._drafts:
            self._report_drafts(self._drafts, load)
        return load

    def _report_drafts(self, drafts: Drafts, load: pb.Load) -> None:
        load.draft_seconds = drafts.seconds
        seconds, guesses, right = self._drafted
        self._metrics.drafted(
            drafts.seconds - seconds, drafts.compared - guesses, drafts.right - right
        )
        self._drafted = (drafts.seconds, drafts.compared, drafts.right)
        if self.idle:
            load.fault = load.fault or drafts.check()

    @property
    def _transfers(self) -> int:
        return self._scheduler.travelling

    def _begin(self, work: Work, order: Order) -> DecodeSequence:
        job = DecodeSequence.queued(work, self._pool)
        if isinstance(order, pb.Reserve):
            job.sender = order.sender
            self._scheduler.reserve(job)
        else:
            self._scheduler.compute(job)
        return job

    def _plan(self) -> Plan:
        for sequence in self._scheduler.grant():
            self._send_ticket(self._jobs[sequence.work.key])
        return self._scheduler.next()

    def _send_ticket(self, job: DecodeSequence) -> None:
        key, lease, seconds = job.work.key, job.lease, self._ticket_seconds
        pages = lease.fresh
        self._transfer.post(ExpectPages(key, job.sender, pages, seconds))
        reserved = pb.Reserved(
            request_id=key.request_id,
            epoch=key.epoch,
            ticket=self._transfer.ticket(key, pages, seconds, held_pages=lease.held_before),
            queue_seconds=time.monotonic() - job.queued_at,
            cached_tokens=job.cached_tokens,
        )
        self._outbox.send(job.attachment, pb.WorkerMessage(reserved=reserved))

    def _arrive(self, event: Arrived) -> None:
        self._leaving.free(event.key)
        if self._scheduler.arrive(event.key, event.first_token):
            self._jobs[event.key].queued_at = time.monotonic()

    def _commit(self, job: DecodeSequence, settled: Settled) -> None:
        drawn = list(map(token_and_logprobs, settled.drawn))
        finish = job.append(*(token for token, _ in drawn)) if drawn else None
        job.settle(settled.computed)
        if not drawn:
            return
        if settled.guesses:
            self._count_guesses(settled.guesses, len(drawn) - 1)
        self._step_tokens[job.attachment].append(_new_tokens(job, drawn, finish, settled.guesses))
        job.decoding = True
        if finish:
            self._scheduler.remove(job)
            del self._jobs[job.work.key]

    def _count_guesses(self, guessed: int, accepted: int) -> None:
        self._guessed += guessed
        self._accepted += accepted
        self._guessed_steps += 1
        self._metrics.guessed(guessed, accepted)

    def _end_step(self, plan: Plan) -> None:
        for attachment, tokens in self._step_tokens.items():
            self._outbox.send(attachment, pb.WorkerMessage(step=pb.Step(tokens=tokens)))
        self._step_tokens.clear()

    def _lose(self, job: DecodeSequence, error: BatonError | None) -> None:
        """Ends a reservation whose prompt will not arrive. Without an error, prefill reports the
        reason to the router (token #1 was the last, or prefill failed), and a message from here
        could overtake that report."""
        if error is None:
            self._release(job.work.key)
        else:
            self._fail(job, error)

    def _release(self, key: AttemptKey) -> None:
        job = self._jobs.pop(key, None)
        if job is not None and not self._scheduler.remove(job):
            self._leaving.hold(key, job.lease)
            self._transfer.post(ReleaseReservation(key))


def _new_tokens(
    job: DecodeSequence,
    drawn: list[tuple[int, Logprobs | None]],
    finish: FinishReason | None,
    guesses: int,
) -> pb.StepTokens:
    """Message with the job's new tokens; the first one also has its queue and compute times."""
    message = pb.StepTokens(
        request_id=job.work.key.request_id,
        epoch=job.work.key.epoch,
        token_ids=[token for token, _ in drawn],
        finish_reason=finish_to(finish),
        logprobs=[logprobs_to(logprobs) for _, logprobs in drawn if logprobs],
        guessed_tokens=guesses,
    )
    if not job.decoding:
        message.queue_seconds = job.started_at - job.queued_at
        message.compute_seconds = time.monotonic() - job.started_at
        if not job.sender:  # the prompt was computed here
            message.cached_tokens = job.cached_tokens
            message.restored_tokens = job.restored_tokens
            message.prompt_logprobs.extend(map(logprobs_to, job.prompt_scores))
            message.embedding = job.pooled.embedding if job.pooled else b""
    return message


class Loans(HeldLeases):
    """Cached pages that are being pushed to the prefill worker that fetches them.

        PagesWanted ─▶ lent ─PushEnded─▶ back in the cache
             │
             └─ not cached, or too many loans ─▶ declined

    A loan is a lease, so lent pages are not evicted. It ends with its push.
    """

    def __init__(self, pool: PagePool, transfer: TransferThread) -> None:
        super().__init__(written=False)
        self._pool = pool
        self._transfer = transfer

    def answer(self, wanted: PagesWanted) -> None:
        lease = self._pool.hold(wanted.page_keys if len(self) < MOST_LOANS else ())
        if lease.pages:
            self.hold(wanted.key, lease)
            self._transfer.post(LendPages(wanted.key, wanted.peer, wanted.ticket, lease.pages))
        else:
            lease.release()
            self._transfer.post(DeliverTicket(wanted.key, wanted.ticket))
