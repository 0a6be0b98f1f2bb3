"""The prefill phase: compute prompts in chunks, push their pages, emit token #1.

The life of one attempt:

    Prefill ─▶ waiting ─▶ computing ─▶ token #1 sent ─▶ pushing ─▶ Pushed, pages freed
                  │           │                            │
                  └───────────┴───────── Release ──────────┴─▶ push cancelled ─▶ pages freed

Pages are freed only when the transfer thread reports the end of the push: until
then a write may still read them.

A prompt may first wait for pages that are fetched from another worker's cache
(`Fetches`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from baton.core.config import Config
from baton.core.errors import Exhausted, Internal
from baton.core.types import AttemptKey, DeviceEvent, FinishReason, Logprobs, Role, Work
from baton.core.wire import failed_to, finish_to, logprobs_to
from baton.engine.page_pool import PagePool
from baton.engine.step import Plan, token_and_logprobs
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
    ReleaseReservation,
    ReservationFailed,
    ReservationFreed,
    ReservationOverdue,
    StartFetch,
    TransferEvent,
)
from baton.kv_transfer.transfer_thread import TransferThread
from baton.prefill_worker.prefill_scheduler import PrefillScheduler, PrefillSequence, PromptFetch
from baton.v1 import worker_pb2 as pb
from baton.worker.held_leases import HeldLeases
from baton.worker.metrics import WorkerMetrics
from baton.worker.phase import Order, Phase
from baton.worker.step_pipeline import Settled


class PrefillPhase(Phase[PrefillSequence]):
    role = Role.PREFILL
    accepted = ("prefill",)

    def _set_up(self, config: Config) -> None:
        self._fetches = Fetches(self._pool, self._transfer, self._metrics)
        self._held.append(self._fetches)
        prefill = config.prefill
        self._scheduler: PrefillScheduler = PrefillScheduler(
            self._pool, prefill.chunk_tokens, self._fetches.coming, prefill.background_tokens
        )

    def on_message(self, attachment: int, message: pb.RouterMessage, arrived: float) -> None:
        match message.WhichOneof("kind"):
            case "connect":
                self._transfer.post(ConnectPeer(message.connect.worker_id, message.connect.pool))
            case "deliver":
                self._deliver(message.deliver)
            case _:
                super().on_message(attachment, message, arrived)

    def _on_transfer(self, event: TransferEvent) -> None:
        match event:
            case PeerConnected() | PeerDisconnected():
                self._outbox.broadcast(_peer_changed(event))
            case PushOverdue():
                self._leaving.mark_overdue(event.key)
            case PushFailed() if event.key in self._jobs:
                self._fail(self._jobs[event.key], event.error)
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

    @property
    def _transfers(self) -> int:
        return sum(job.delivered for job in self._jobs.values())

    def _begin(self, work: Work, order: Order) -> PrefillSequence:
        assert isinstance(order, pb.Prefill)
        job = PrefillSequence.queued(work, self._pool)
        job.push = bool(order.receiver)
        self._scheduler.add(job)
        if order.holder.pages and self._may_fetch(job):
            job.fetch = self._fetches.begin(work.key, order.holder, job.keys_to_find)
        if job.push:
            self._transfer.post(OpenPush(work.key, order.receiver))
        return job

    def _may_fetch(self, job: PrefillSequence) -> bool:
        """True if the pages are not coming anyway and there is room for all waiting prompts, which
        a fetch must not delay."""
        has_room = self._scheduler.waiting_pages <= self._pool.free
        return has_room and not self._scheduler.has_to_wait(job)

    def _deliver(self, message: pb.Deliver) -> None:
        key = AttemptKey(message.request_id, message.epoch)
        self._transfer.post(DeliverTicket(key, message.ticket))
        if key in self._jobs:
            self._jobs[key].delivered = True

    def step(self) -> bool:
        encoded = self._encode(self._scheduler.next_inputs())
        return super().step() or encoded

    def _encode(self, inputs: list[PrefillSequence]) -> bool:
        """Computes inputs of the embedding model, between steps. Returns False without inputs."""
        if not inputs:
            return False
        self._advance({})  # settles the steps in flight: the record ends steps in order
        self._start(dict.fromkeys(inputs, 0))
        began = time.monotonic()
        self._steps.record.begin(inputs)
        for job, finite in zip(inputs, self._engine.encode(inputs), strict=True):
            if finite:
                self._emit_embedding(job)
            else:
                self._fail(job, Internal("the embedding is not finite"))
        self._steps.record.end()
        rows = sum(len(each.work.prompt_tokens) for each in inputs)
        self._metrics.step(len(inputs), rows, time.monotonic() - began)
        self._outbox.flush()
        return True

    def _emit_embedding(self, job: PrefillSequence) -> None:
        job.chunks.end(len(job.tokens), time.monotonic())
        self._scheduler.remove(job)
        self._outbox.send(job.attachment, _first_token(job, job.append(0), None))
        self._forget(job)

    def _plan(self) -> Plan:
        return self._scheduler.next()

    def _start(self, plan: Plan) -> list[PrefillSequence]:
        new = super()._start(plan)
        for job in new:
            job.chunks.begin(job.cached_tokens, job.started_at)
        return new

    def _commit(self, job: PrefillSequence, settled: Settled) -> None:
        job.chunks.end(settled.computed, time.monotonic())
        for drawn in settled.drawn:
            self._emit(job, *token_and_logprobs(drawn))
        if not settled.drawn:
            self._push(job, settled.computed // self._pool.page_size)
        job.settle(settled.computed)
        if settled.drawn and not job.push:
            self._forget(job)

    def _unblock(self) -> bool:
        """Fails the youngest prompt that holds pages if nothing else will free any. Background
        prompts go first.

        Several routers may order the same two requests differently here and at
        decode. Then one prompt may fill this pool and wait for decode's pages,
        which decode holds for another prompt that waits for this pool. Or several prompts
        need a page of a layer with a window, and none is free.
        """
        holders = [job for job in self._jobs.values() if not job.lease.released]
        # A started prompt is in every plan, unless there is no page for its next token.
        leaving = (job.delivered and not self._scheduler.has_started(job) for job in holders)
        will_free = any(leaving) or self._leaving or self._pool.returning
        blocked = self._scheduler.cleared_waiting or self._scheduler.running
        if not holders or will_free or not blocked or self._scheduler.paused:
            return False
        if self._fetches.coming or (self._adapters and self._adapters.loading):
            return False
        youngest = max(holders, key=lambda job: (job.work.background, job.queued_at))
        error = Exhausted("the prefill and decode pools are full; try again")
        self._fail(youngest, error, retry=True)
        return True

    def _emit(self, job: PrefillSequence, token: int, logprobs: Logprobs | None) -> None:
        """Sends token #1, then pushes the last pages."""
        key, finish = job.work.key, job.append(token)
        self._scheduler.remove(job)
        self._outbox.send(job.attachment, _first_token(job, finish, logprobs))
        self._outbox.flush()
        if job.push and finish:
            self._leave(job)
        elif job.push:
            tokens = len(job.work.prompt_tokens)
            pages = job.lease.listed(job.pushed_pages, len(job.lease), tokens)
            self._transfer.post(FinishPush(key, token, pages))

    def _end_step(self, plan: Plan) -> None:
        """Pushes pages that the device is still computing: the write waits for the device, not for
        the host."""
        end = self._steps.last_end
        if not plan or end is None or not self._transfer.pushes_ahead:
            return
        for key in [sequence.work.key for sequence in plan]:
            if job := self._jobs.get(key):
                whole = job.expected  # the last chunk: push the last page, though not full
                full = len(job.lease) if whole else job.computed // self._pool.page_size
                self._push(job, full, end)

    def _push(self, job: PrefillSequence, count: int, after: DeviceEvent | None = None) -> None:
        """Pushes those of a prompt's first `count` pages that were not pushed before."""
        if job.push and count > job.pushed_pages:
            pages = job.lease.listed(job.pushed_pages, count, len(job.work.prompt_tokens))
            if pages:
                self._transfer.post(PushPages(job.work.key, pages, after))
            job.pushed_pages = count

    def _release(self, key: AttemptKey) -> None:
        job = self._jobs.get(key)
        if job is None:
            return
        self._fetches.cancel(key)
        self._scheduler.remove(job)
        if job.push:
            self._leave(job)
        else:
            self._forget(job)

    def _leave(self, job: PrefillSequence) -> None:
        """Cancels the push. Its end frees the pages."""
        key = job.work.key
        del self._jobs[key]
        if not job.lease.released:
            self._leaving.hold(key, job.lease)
        self._transfer.post(CancelPush(key))

    def _end_push(self, event: PushEnded) -> None:
        self._metrics.transferred(event.bytes, event.seconds)
        if job := self._jobs.get(event.key):
            self._outbox.send(job.attachment, _push_ended(event))
            self._scheduler.remove(job)
            self._forget(job)
        self._leaving.free(event.key)

    def _forget(self, job: PrefillSequence) -> None:
        del self._jobs[job.work.key]
        if not job.lease.released:
            job.lease.release()


def _first_token(
    job: PrefillSequence, finish: FinishReason | None, logprobs: Logprobs | None
) -> pb.WorkerMessage:
    """Token #1, with the time breakdown so far."""
    first = pb.FirstToken(
        request_id=job.work.key.request_id,
        epoch=job.work.key.epoch,
        token=job.tokens[-1],
        finish_reason=finish_to(finish),
        queue_seconds=job.started_at - job.queued_at,
        compute_seconds=time.monotonic() - job.started_at,
        cached_tokens=job.cached_tokens,
        restored_tokens=job.restored_tokens,
        logprobs=logprobs_to(logprobs) if logprobs else None,
        prompt_logprobs=map(logprobs_to, job.prompt_scores),
        chunks=job.chunks.chunks,
        embedding=job.pooled.embedding if job.pooled else b"",
    )
    if job.fetch is not None:
        first.fetched_tokens = job.fetch.used(job.lease.found) * job.chain.page_size
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


class Fetches(HeldLeases):
    """Leases of pages that are being fetched from another worker's cache.

        begin ─▶ under way ─Fetched─▶ pages in the cache, free for the prompt to find
                     │
                     └─ failed, too late, cancelled ─▶ leaving: the holder may still write;
                                                       the pages are freed when the transfer
                                                       thread reports that nothing can arrive

    A prompt whose pages are under way waits for them, and so do prompts with the same
    continuation. When a fetch fails the prompt is computed: it never fails a request.
    """

    def __init__(self, pool: PagePool, transfer: TransferThread, metrics: WorkerMetrics) -> None:
        super().__init__(written=True)
        self._pool = pool
        self._transfer = transfer
        self._metrics = metrics
        self._fetches: dict[AttemptKey, PromptFetch] = {}
        # The keys of pages under way.
        self.coming: Counter[bytes] = Counter()

    def begin(
        self, key: AttemptKey, holder: pb.Holder, keys: Sequence[bytes]
    ) -> PromptFetch | None:
        """Asks the holder for those of a prompt's first pages that are not cached here. The pool
        must have room for them. Returns None if all are cached."""
        keys = keys[: holder.pages]
        before, cache = self._pool.find(keys), self._pool.cache
        if before == len(keys):
            return None
        wanted = self._pool.keys_of_hit(keys)
        ordered = sorted(wanted, key=lambda each: each not in cache)  # the cached ones first
        lease = self._pool.hold(ordered)
        fetch = PromptFetch(ordered, lease, keys[before], before, time.monotonic())
        lease.extend(len(fetch.awaited))
        self.hold(key, lease)
        self._fetches[key] = fetch
        self.coming.update(fetch.coming)
        self._ask(key, fetch, holder)
        return fetch

    def _ask(self, key: AttemptKey, fetch: PromptFetch, holder: pb.Holder) -> None:
        # Do not wait longer than a lease for a silent holder.
        most = self._transfer.lease_seconds
        seconds = holder.seconds if 0 < holder.seconds < most else most
        pages = fetch.lease.fresh
        ticket = self._transfer.ticket(key, pages, seconds)
        self._transfer.post(StartFetch(key, holder.agent, ticket, pages, fetch.awaited, seconds))

    def arrive(self, event: Fetched) -> None:
        """Adds the pages to the cache, even if the prompt has been released."""
        fetch = self._fetches[event.key]
        if fetch.under_way:
            self._end(fetch)
        fetch.pages, fetch.seconds = event.pages, event.seconds
        fetch.lease.name(fetch.keys[: fetch.lease.found + event.pages])
        self._metrics.fetched(event.pages, event.seconds)
        self.free(event.key)

    def fail(self, key: AttemptKey) -> None:
        """Ends a fetch that failed. Its pages are held until `free`."""
        fetch = self._fetches.get(key)
        if fetch is not None and fetch.under_way:
            self._end(fetch)
            self._metrics.fetch_failed(fetch.seconds)

    def cancel(self, key: AttemptKey) -> None:
        """Cancels the fetch of a released prompt."""
        fetch = self._fetches.get(key)
        if fetch is not None and fetch.under_way:
            self._end(fetch)
            self._transfer.post(ReleaseReservation(key))

    def free(self, key: AttemptKey) -> None:
        self._fetches.pop(key, None)
        super().free(key)

    def _end(self, fetch: PromptFetch) -> None:
        fetch.under_way = False
        fetch.seconds = time.monotonic() - fetch.began
        for key in fetch.coming:
            self.coming[key] -= 1
            if not self.coming[key]:
                del self.coming[key]
