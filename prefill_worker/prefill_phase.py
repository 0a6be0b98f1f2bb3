"""The prefill phase: compute prompts in chunks, push their pages, emit token #1.

The life of one attempt:

    Prefill ─▶ waiting ─▶ computing ─▶ token #1 sent ─▶ pushing ─▶ Pushed, pages freed
                  │           │                            │
                  └───────────┴───────── Release ──────────┴─▶ push cancelled ─▶ pages freed

Pages are freed only when the transfer thread reports the end of the push: until
then a write may still read them.

A prompt may first wait for pages that are fetched from another worker's cache
(prefill_worker/prefill_jobs.py).
"""

from __future__ import annotations

import time

from baton.core.config import Config
from baton.core.errors import BatonError, Exhausted
from baton.core.types import AttemptKey, DeviceEvent, FinishReason, Logprobs, Role
from baton.core.wire import failed_to, finish_to, logprobs_to, work_from
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from baton.engine.step import Chunk
from baton.kv_transfer.transfer_events import (
    CancelPush,
    ConnectPeer,
    DeliverTicket,
    Fetched,
    FinishPush,
    OpenPush,
    PagesWanted,
    PeerConnected,
    PeerDisconnected,
    PushEnded,
    PushFailed,
    PushOverdue,
    PushPages,
    ReservationFailed,
    ReservationFreed,
    ReservationOverdue,
    SenderDied,
    TransferEvent,
)
from baton.kv_transfer.transfer_thread import TransferThread
from baton.prefill_worker.prefill_jobs import Fetches, PrefillJob
from baton.prefill_worker.prefill_scheduler import PrefillScheduler
from baton.v1 import worker_pb2 as pb
from baton.worker.metrics import WorkerMetrics
from baton.worker.outbox import Outbox
from baton.worker.phase import Phase
from baton.worker.step_pipeline import Settled


class PrefillPhase(Phase[PrefillJob]):
    role = Role.PREFILL

    def __init__(
        self,
        engine: Engine,
        transfer: TransferThread,
        outbox: Outbox,
        metrics: WorkerMetrics,
        config: Config,
    ) -> None:
        super().__init__(engine, transfer, outbox, metrics, config)
        self._fetches = Fetches(engine.pool, transfer, metrics)
        self._scheduler = PrefillScheduler(
            engine.pool, config.prefill.chunk_tokens, self._fetches.coming
        )

    @property
    def settled(self) -> bool:
        return self.idle and not self._steps.any and not self._fetches.pages

    def on_message(self, attachment: int, message: pb.RouterMessage, arrived: float) -> None:
        match message.WhichOneof("kind"):
            case "connect":
                self._transfer.post(ConnectPeer(message.connect.worker_id, message.connect.pool))
            case "prefill":
                self._accept(attachment, message.prefill, arrived)
            case "deliver":
                self._deliver(message.deliver)
            case "release":
                self._release(AttemptKey(message.release.request_id, message.release.epoch))
            case "sender_gone":
                self._transfer.post(SenderDied(message.sender_gone.agent))
            case "reserve":
                self._refuse(attachment, message.reserve.work)
            case "compute":
                self._refuse(attachment, message.compute.work)

    def hand_back(self) -> None:
        for job in [job for job in self._jobs.values() if not job.released]:
            self._fail(job, self._drained())

    def _on_transfer(self, event: TransferEvent) -> None:
        match event:
            case PeerConnected() | PeerDisconnected():
                self._outbox.broadcast(_peer_changed(event))
            case PushOverdue() if event.key in self._jobs:
                self._jobs[event.key].overdue = True
            case PushFailed():
                job = self._jobs.get(event.key)
                if job is not None and not job.released:
                    self._fail(job, event.error)
            case PushEnded():
                self._end_push(event)
            case Fetched():
                self._fetches.arrive(event)
            case ReservationFailed():
                self._fetches.fail(event.key)
            case ReservationFreed():
                self._fetches.free(event.key)
            case ReservationOverdue():
                self._fetches.mark_overdue(event.key)
            case PagesWanted():  # its router did not know of the role switch yet
                self._transfer.post(DeliverTicket(event.key, event.ticket))

    def step(self) -> bool:
        self._pool.lower.advance()
        plan = self._scheduler.next()
        if not plan and not self._steps.any:
            return self._break_deadlock()
        self._start(plan)
        for settled in self._steps.advance(plan):
            self._commit(settled)
        self._push_ahead(plan)
        return True

    def load(self) -> pb.Load:
        transfers = sum(job.delivered for job in self._jobs.values())
        return self._measure_load(self._scheduler, len(self._fetches.pages), transfers)

    @property
    def _quarantined(self) -> int:
        """Pages that a cancelled write has been reading, or may reach, for too long."""
        overdue = (job.lease.pages for job in self._jobs.values() if job.overdue and job.lease)
        return len(self._fetches.overdue_pages.union(*overdue))

    def _accept(self, attachment: int, message: pb.Prefill, arrived: float) -> None:
        work = work_from(message.work)
        if work.key in self._jobs:
            return
        try:
            self._check(work, len(work.prompt_tokens))
        except BatonError as error:
            self._outbox.send(attachment, failed_to(work.key, error))
            return
        push = bool(message.receiver)
        guide = self._engine.guide(work)
        job = PrefillJob(attachment, work, push, arrived, guide=guide)
        self._jobs[work.key] = job
        keys = self._scheduler.add(work)
        if message.holder.pages and self._may_fetch(keys):
            job.fetch = self._fetches.begin(work.key, message.holder, keys)
        if push:
            self._transfer.post(OpenPush(work.key, message.receiver))
        else:
            self._scheduler.clear(work.key)

    def _may_fetch(self, keys: list[bytes]) -> bool:
        """Whether the pages are not coming anyway, and there is room for all waiting prompts: a
        fetch must not delay them."""
        has_room = self._scheduler.waiting_pages <= self._pool.free
        return has_room and not self._scheduler.has_to_wait(keys)

    def _deliver(self, message: pb.Deliver) -> None:
        key = AttemptKey(message.request_id, message.epoch)
        self._transfer.post(DeliverTicket(key, message.ticket))
        if key in self._jobs:
            self._jobs[key].delivered = True
            self._scheduler.clear(key)

    def _start(self, plan: list[Chunk]) -> None:
        for piece in plan:
            job = self._jobs[piece.sequence.work.key]
            if job.lease is None:
                job.lease = piece.sequence.lease
                piece.sequence.set_guide(job.guide)
                job.started = time.monotonic()
                job.chunks.begin(piece.sequence.cached_tokens, job.started)
                self._metrics.queued(job.started - job.arrived)

    def _commit(self, settled: Settled) -> None:
        sequence, outcome = settled.sequence, settled.outcome
        job = self._jobs.get(sequence.work.key)
        if job is None or job.released or job.lease is not sequence.lease:
            return  # released while its step was in flight
        if isinstance(outcome, BatonError):
            sequence.lease.forget()
            self._fail(job, outcome)
            return
        job.chunks.end(settled.computed, time.monotonic())
        if outcome is None:
            self._push(job, sequence.lease.pages[: settled.computed // self._pool.page_size])
        else:
            self._emit(job, sequence, outcome, settled.logprobs)
        sequence.settle(settled.computed)
        if outcome is not None and not job.push:
            self._forget(job)

    def _break_deadlock(self) -> bool:
        """Fails the youngest prompt that holds pages when nothing else frees any.

        Several routers may order the same two requests differently here and at
        decode. Then one prompt may fill this pool and wait for decode's pages,
        which decode holds for another prompt that waits for this pool.
        """
        holders = [job for job in self._jobs.values() if job.lease is not None]
        will_free = any(job.delivered or job.released for job in holders) or self._pool.returning
        if not holders or will_free or not self._scheduler.cleared_waiting:
            return False
        if self._fetches.coming:
            return False
        youngest = max(holders, key=lambda job: job.arrived)
        error = Exhausted("the prefill and decode pools are full; try again")
        self._fail(youngest, error, retry=True)
        return True

    def _fail(self, job: PrefillJob, error: BatonError, *, retry: bool = False) -> None:
        self._outbox.send(job.attachment, failed_to(job.work.key, error, retry=retry))
        self._release(job.work.key)

    def _emit(
        self, job: PrefillJob, sequence: Sequence, token: int, logprobs: Logprobs | None
    ) -> None:
        """Sends token #1, then pushes the last pages."""
        key = job.work.key
        finish = sequence.append(token)
        self._scheduler.remove(key)
        first = _first_token(job, sequence, finish, logprobs, self._pool.page_size)
        self._outbox.send(job.attachment, first)
        self._outbox.flush()
        if job.push and finish:
            job.released = True
            self._transfer.post(CancelPush(key))
        elif job.push:
            self._transfer.post(FinishPush(key, token, sequence.lease.pages[job.pushed_pages :]))

    def _push_ahead(self, plan: list[Chunk]) -> None:
        """Pushes pages that the device is still computing: the write waits for the device, not for
        the host."""
        end = self._steps.last_end
        if not plan or end is None or not self._transfer.pushes_ahead:
            return
        for sequence in (piece.sequence for piece in plan):
            job = self._jobs.get(sequence.work.key)
            if job is not None and not job.released:
                whole = sequence.expected  # its last chunk: its last page too
                full = None if whole else sequence.computed // self._pool.page_size
                self._push(job, sequence.lease.pages[:full], end)

    def _push(self, job: PrefillJob, pages: list[int], after: DeviceEvent | None = None) -> None:
        """Pushes those of a prompt's first pages that were not pushed before."""
        if job.push and len(pages) > job.pushed_pages:
            self._transfer.post(PushPages(job.work.key, pages[job.pushed_pages :], after))
            job.pushed_pages = len(pages)

    def _release(self, key: AttemptKey) -> None:
        job = self._jobs.get(key)
        if job is None or job.released:
            return
        job.released = True
        self._fetches.cancel(key)
        sequence = self._scheduler.remove(key)
        if sequence is not None:
            job.lease = sequence.lease
        if job.push:
            self._transfer.post(CancelPush(key))
        else:
            self._forget(job)

    def _end_push(self, event: PushEnded) -> None:
        job = self._jobs.get(event.key)
        if job is None:
            return
        self._metrics.transferred(event.bytes, event.seconds)
        if not job.released:
            self._outbox.send(job.attachment, _push_ended(event))
            self._scheduler.remove(event.key)
        self._forget(job)

    def _forget(self, job: PrefillJob) -> None:
        del self._jobs[job.work.key]
        if job.lease is not None:
            job.lease.release()


def _first_token(
    job: PrefillJob,
    sequence: Sequence,
    finish: FinishReason | None,
    logprobs: Logprobs | None,
    page_size: int,
) -> pb.WorkerMessage:
    """Token #1, with the time breakdown so far."""
    first = pb.FirstToken(
        request_id=job.work.key.request_id,
        epoch=job.work.key.epoch,
        token=sequence.tokens[-1],
        finish_reason=finish_to(finish),
        queue_seconds=job.started - job.arrived,
        compute_seconds=time.monotonic() - job.started,
        cached_tokens=sequence.cached_tokens,
        restored_tokens=sequence.restored_tokens,
        logprobs=logprobs_to(logprobs) if logprobs else None,
        prompt_logprobs=map(logprobs_to, sequence.prompt_scores),
        chunks=job.chunks.chunks,
    )
    if job.fetch is not None:
        first.fetched_tokens = job.fetch.used(sequence.lease.found) * page_size
        first.fetch_seconds = job.fetch.seconds
    return pb.WorkerMessage(first_token=first)


def _push_ended(event: PushEnded) -> pb.WorkerMessage:
    if event.error is not None:
        return failed_to(event.key, event.error)
    pushed = pb.Pushed(
        request_id=event.key.request_id,
        epoch=event.key.epoch,
        bytes=event.bytes,
        seconds=event.seconds,
        exposed_seconds=event.exposed_seconds,
    )
    return pb.WorkerMessage(pushed=pushed)


def _peer_changed(event: PeerConnected | PeerDisconnected) -> pb.WorkerMessage:
    connected = pb.Connected(worker_id=event.worker_id, agent=event.agent)
    if isinstance(event, PeerDisconnected):
        connected.lost = True
    elif event.error is not None:
        connected.error, connected.reason = event.error.message, event.error.reason
    return pb.WorkerMessage(connected=connected)
