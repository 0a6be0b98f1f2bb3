"""What the prefill phase tells routers of an attempt, and of the workers that it pushes to."""

from __future__ import annotations

import time

from baton.core.types import FinishReason, Logprobs
from baton.core.wire import failed_to, finish_to, logprobs_to
from baton.engine.sequence import Sequence
from baton.kv_transfer.events import PeerConnected, PeerDisconnected, PushEnded
from baton.prefill_worker.job import Job
from baton.v1 import worker_pb2 as pb


def first_token(
    job: Job,
    sequence: Sequence,
    finish: FinishReason | None,
    logprobs: Logprobs | None,
    page_size: int,
) -> pb.WorkerMessage:
    """Token #1, and where the time until here went."""
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
        chunks=job.chunks.tell(),
    )
    if job.fetch is not None:
        first.fetched_tokens = job.fetch.used(sequence.lease.found) * page_size
        first.fetch_seconds = job.fetch.seconds
    return pb.WorkerMessage(first_token=first)


def push_ended(event: PushEnded) -> pb.WorkerMessage:
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


def peer_changed(event: PeerConnected | PeerDisconnected) -> pb.WorkerMessage:
    connected = pb.Connected(worker_id=event.worker_id, agent=event.agent)
    if isinstance(event, PeerDisconnected):
        connected.lost = True
    elif event.error is not None:
        connected.error, connected.reason = event.error.message, event.error.reason
    return pb.WorkerMessage(connected=connected)
