"""Transfers that go wrong, with real processes over NIXL, and pages that arrive damaged."""

from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest
from forks import fork
from inprocess_transport import InProcessTransport
from pools import NIXL, CpuBytes
from transfer_workers import KEY, TransferWorker

from baton.core.errors import Unavailable
from baton.kv_transfer.nixl_transport import NixlTransport
from baton.kv_transfer.pool_layout import cpu_digest
from baton.kv_transfer.transfer_events import (
    Arrived,
    ConnectPeer,
    DeliverTicket,
    FinishPush,
    OpenPush,
    PagesDamaged,
    PeerConnected,
    PeerDisconnected,
    PushEnded,
    PushFailed,
    PushPages,
    ReleaseReservation,
    ReservationFailed,
    ReservationFreed,
    ReservationOverdue,
)
from baton.kv_transfer.transport import PagePart, PageWrite, PoolMemory, Transport
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout

PAGE_BYTES = 8192
PAGES = 8
LEASE_SECONDS = 1.0
LAYOUT = PoolLayout(version=1, model="m")

needs_nixl = pytest.mark.skipif(not NIXL, reason="needs NIXL (pip install nixl, on Linux)")


class Worker(TransferWorker):
    """Its pages have digests."""

    def __init__(self, transport: Transport) -> None:
        self.bytes = CpuBytes(PAGES * PAGE_BYTES)
        memory = PoolMemory(self.bytes.base, PAGE_BYTES, PAGES, "cpu")
        digest = cpu_digest(memory)
        super().__init__(transport, memory, LAYOUT, lambda _, pages: digest(pages), LEASE_SECONDS)

    def begin_push(self, receiver: PoolAddress, ticket: bytes) -> None:
        """Sends one page of two; the other is still to be computed."""
        self.bytes.fill(0, PAGE_BYTES, 7)
        self.thread.post(OpenPush(KEY, receiver.agent))
        self.thread.post(DeliverTicket(KEY, ticket))
        self.thread.post(PushPages(KEY, [0]))

    def wait_for_page(self, page: int) -> None:
        while self.bytes.read(page * PAGE_BYTES, 1) != b"\7":
            os.sched_yield()


@contextmanager
def other_process(serve: Callable[[Connection], None]) -> Iterator[tuple[int, Connection]]:
    """A worker in a process of its own, and the pipe to it."""
    here, there = multiprocessing.Pipe()
    process = fork(serve, (there,))
    assert process.pid is not None
    try:
        yield process.pid, here
    finally:
        process.kill()
        process.join()


def serve_prefill(pipe: Connection) -> None:
    worker = Worker(NixlTransport())
    receiver = PoolAddress.FromString(pipe.recv_bytes())
    worker.thread.post(ConnectPeer("decode", receiver))
    worker.next(PeerConnected)
    pipe.send_bytes(worker.agent.encode())
    worker.begin_push(receiver, pipe.recv_bytes())
    pipe.recv_bytes()


def serve_decode(pipe: Connection) -> None:
    worker = Worker(NixlTransport())
    pipe.send_bytes(worker.thread.pool_address.SerializeToString())
    pipe.send_bytes(worker.reserve([4, 5], pipe.recv_bytes().decode()))
    pipe.recv_bytes()


@pytest.fixture
def decode() -> Iterator[Worker]:
    worker = Worker(NixlTransport())
    yield worker
    worker.thread.stop()


def begin(decode: Worker, pipe: Connection) -> None:
    """Has the other process write the first of two pages."""
    pipe.send_bytes(decode.thread.pool_address.SerializeToString())
    sender = pipe.recv_bytes().decode()
    pipe.send_bytes(decode.reserve([4, 5], sender))
    decode.wait_for_page(4)


@needs_nixl
def test_pages_of_a_killed_sender_are_freed_though_nobody_says_that_it_died(
    decode: Worker,
) -> None:
    with other_process(serve_prefill) as (pid, pipe):
        begin(decode, pipe)
        os.kill(pid, signal.SIGKILL)
        decode.thread.post(ReleaseReservation(KEY))
        # A process takes a moment to die.
        while isinstance(event := decode.events.get(timeout=20), ReservationOverdue):
            pass
        assert event == ReservationFreed(KEY)


@needs_nixl
def test_pages_of_a_frozen_sender_stay_in_quarantine_until_it_thaws(decode: Worker) -> None:
    with other_process(serve_prefill) as (pid, pipe):
        begin(decode, pipe)
        os.kill(pid, signal.SIGSTOP)
        assert isinstance(decode.next(ReservationFailed).error, Unavailable)
        decode.thread.post(ReleaseReservation(KEY))
        decode.next(ReservationOverdue)
        with pytest.raises(queue.Empty):
            decode.events.get(timeout=2 * LEASE_SECONDS)
        os.kill(pid, signal.SIGCONT)
        assert decode.next(ReservationFreed) == ReservationFreed(KEY)


@needs_nixl
def test_a_push_to_a_frozen_receiver_fails_when_its_lease_lapses() -> None:
    prefill = Worker(NixlTransport())
    with other_process(serve_decode) as (pid, pipe):
        receiver = PoolAddress.FromString(pipe.recv_bytes())
        prefill.thread.post(ConnectPeer("decode", receiver))
        prefill.next(PeerConnected)
        pipe.send_bytes(prefill.agent.encode())
        prefill.begin_push(receiver, pipe.recv_bytes())
        os.kill(pid, signal.SIGSTOP)
        prefill.next(PeerDisconnected)
        # A write that is under way cannot be withdrawn: the end may take longer than the failure.
        event = prefill.events.get(timeout=20)
        assert isinstance(event, PushFailed | PushEnded)
        assert isinstance(event.error, Unavailable)
    prefill.thread.stop()


class Damaging(InProcessTransport):
    """Flips a bit in the first page of the first `times` writes that arrive."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self._times = times

    def _receive(
        self, sender: str, source: PoolMemory, part: PagePart | None, write: PageWrite
    ) -> bool:
        pages = dataclasses.replace(write, note=b"")
        received = super()._receive(sender, source, part, pages)
        if write.remote_pages and self._times:
            self._times -= 1
            place = self._registered.base + write.remote_pages[0] * PAGE_BYTES + PAGE_BYTES // 2
            (ctypes.c_uint8).from_address(place).value ^= 1
        note = PageWrite(write.peer, note=write.note)
        return received and super()._receive(sender, source, part, note)


def push_two_pages(decode: Worker) -> Worker:
    prefill = Worker(InProcessTransport())
    prefill.thread.post(ConnectPeer("decode", decode.thread.pool_address))
    prefill.next(PeerConnected)
    prefill.bytes.fill(PAGE_BYTES, PAGE_BYTES, 9)
    prefill.begin_push(decode.thread.pool_address, decode.reserve([4, 5], prefill.agent))
    prefill.thread.post(FinishPush(KEY, 77, [1]))
    return prefill


@pytest.mark.parametrize("times", [1, 3])
def test_a_damaged_page_is_sent_again_and_arrives_sound(times: int) -> None:
    decode = Worker(Damaging(times))
    prefill = push_two_pages(decode)
    damaged = 0
    while isinstance(event := decode.events.get(timeout=10), PagesDamaged):
        damaged += event.count
    assert event == Arrived(KEY, 77)
    assert damaged == times
    assert (
        decode.bytes.read(4 * PAGE_BYTES, 2 * PAGE_BYTES) == b"\7" * PAGE_BYTES + b"\t" * PAGE_BYTES
    )
    assert prefill.next(PushEnded).error is None
    for worker in (prefill, decode):
        worker.thread.stop()


def test_pages_that_are_damaged_every_time_fail_and_are_freed() -> None:
    decode = Worker(Damaging(1000))
    prefill = push_two_pages(decode)
    while isinstance(event := decode.events.get(timeout=10), PagesDamaged):
        pass
    assert isinstance(event, ReservationFailed)
    assert isinstance(event.error, Unavailable)
    assert decode.next(ReservationFreed) == ReservationFreed(KEY)
    assert isinstance(prefill.next(PushEnded).error, Unavailable)
    for worker in (prefill, decode):
        worker.thread.stop()
