"""A prefill worker's and a decode worker's transfer thread, end to end, over each transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from inprocess_transport import InProcessTransport
from pools import KINDS, Kind
from transfer_workers import KEY, TransferWorker

from baton.core.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidConfig,
    LayoutMismatch,
    Unavailable,
    WorkerLost,
)
from baton.core.types import AttemptKey
from baton.kv_transfer.pool_layout import choose_digest
from baton.kv_transfer.transfer_events import (
    Arrived,
    CancelPush,
    ConnectPeer,
    DeliverTicket,
    Fetched,
    FinishPush,
    LendPages,
    OpenPush,
    PagesWanted,
    PeerConnected,
    PeerDisconnected,
    PushEnded,
    PushPages,
    ReleaseReservation,
    ReservationFailed,
    ReservationFreed,
    SenderDied,
    StartFetch,
    TransferCrashed,
)
from baton.kv_transfer.transfer_protocol import TICKET_VERSION
from baton.kv_transfer.transfer_thread import TransferThread
from baton.kv_transfer.transport import PoolMemory, Transport, TransportEvent
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout

PAGE_BYTES = 1024
PAGES = 32
LAYOUT = PoolLayout(version=1, model="m", dtype="float32", page_size=16, layers=2)


class Worker(TransferWorker):
    def __init__(self, kind: Kind, transport: Transport, layout: PoolLayout = LAYOUT) -> None:
        self._bytes = kind.make_bytes(PAGES * PAGE_BYTES, 0)
        memory = kind.make_memory(self._bytes, PAGE_BYTES, PAGES)
        digest = choose_digest("auto", memory)
        by_peer = (lambda _, pages: digest(pages)) if digest else None
        super().__init__(transport, memory, layout, by_peer)

    def fill(self, page: int, value: int) -> None:
        self._bytes.fill(page * PAGE_BYTES, PAGE_BYTES, value)

    def first_bytes(self) -> dict[int, int]:
        """The first byte of every page that was written to."""
        firsts = {page: self._bytes.read(page * PAGE_BYTES, 1)[0] for page in range(PAGES)}
        return {page: first for page, first in firsts.items() if first}


Maker = Callable[..., Worker]


@pytest.fixture(params=KINDS)
def make_worker(request: pytest.FixtureRequest) -> Iterator[Maker]:
    workers: list[Worker] = []

    def make(layout: PoolLayout = LAYOUT) -> Worker:
        kind = KINDS[request.param]
        workers.append(Worker(kind, kind.make_transport(), layout))
        return workers[-1]

    yield make
    for worker in workers:
        worker.thread.stop()


@pytest.fixture
def pair(make_worker: Maker) -> tuple[Worker, Worker]:
    """A prefill worker that is connected to a decode worker."""
    prefill, decode = make_worker(), make_worker()
    prefill.thread.post(ConnectPeer("decode-1", decode.thread.pool_address))
    agent = decode.thread.pool_address.agent
    assert prefill.next(PeerConnected) == PeerConnected("decode-1", agent, None)
    return prefill, decode


def test_a_prompt_lands_chunk_by_chunk(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    for page in (1, 2, 3, 9):
        prefill.fill(page, page)
    prefill.thread.post(OpenPush(KEY, decode.agent))
    prefill.thread.post(PushPages(KEY, [1, 2]))
    prefill.thread.post(DeliverTicket(KEY, decode.reserve([20, 21, 5, 6], prefill.agent)))
    prefill.thread.post(PushPages(KEY, [3]))
    prefill.thread.post(FinishPush(KEY, 77, [9]))
    assert decode.next(Arrived) == Arrived(KEY, 77)
    assert decode.first_bytes() == {20: 1, 21: 2, 5: 3, 6: 9}
    ended = prefill.next(PushEnded)
    assert (ended.key, ended.error, ended.bytes) == (KEY, None, 4 * PAGE_BYTES)
    assert ended.exposed_seconds > 0


def test_many_prompts_land_at_the_same_time(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    keys = [AttemptKey(f"request-{i}", 1) for i in range(PAGES)]
    for page, key in enumerate(keys):
        prefill.fill(page, page + 1)
        prefill.thread.post(OpenPush(key, decode.agent))
        prefill.thread.post(
            DeliverTicket(key, decode.reserve([PAGES - 1 - page], prefill.agent, key=key))
        )
        prefill.thread.post(FinishPush(key, page, [page]))
    arrived = [decode.next(Arrived) for _ in keys]
    assert {(event.key, event.first_token) for event in arrived} == {
        (key, page) for page, key in enumerate(keys)
    }
    assert all(prefill.next(PushEnded).error is None for _ in keys)
    assert decode.first_bytes() == {PAGES - 1 - page: page + 1 for page in range(PAGES)}


def test_a_cancelled_push_fails_and_frees_the_reservation(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    prefill.thread.post(OpenPush(KEY, decode.agent))
    prefill.thread.post(DeliverTicket(KEY, decode.reserve([1, 2], prefill.agent)))
    prefill.thread.post(PushPages(KEY, [1]))
    prefill.thread.post(CancelPush(KEY))
    prefill.thread.post(CancelPush(KEY))
    assert isinstance(prefill.next(PushEnded).error, Cancelled)
    assert decode.next(ReservationFailed) == ReservationFailed(KEY, None)
    assert decode.next(ReservationFreed) == ReservationFreed(KEY)
    assert prefill.events.empty()


def test_a_released_reservation_ends_the_push_and_is_freed(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    prefill.thread.post(OpenPush(KEY, decode.agent))
    prefill.thread.post(DeliverTicket(KEY, decode.reserve([1, 2], prefill.agent)))
    prefill.thread.post(PushPages(KEY, [1]))
    decode.thread.post(ReleaseReservation(KEY))
    assert decode.next(ReservationFreed) == ReservationFreed(KEY)
    assert isinstance(prefill.next(PushEnded).error, Unavailable)


def test_a_ticket_that_comes_after_its_push_was_cancelled_frees_the_reservation(
    pair: tuple[Worker, Worker],
) -> None:
    prefill, decode = pair
    prefill.thread.post(OpenPush(KEY, decode.agent))
    prefill.thread.post(CancelPush(KEY))
    prefill.next(PushEnded)
    prefill.thread.post(DeliverTicket(KEY, decode.reserve([1], prefill.agent)))
    decode.next(ReservationFailed)
    decode.next(ReservationFreed)
    assert prefill.events.empty()


def test_a_reservation_that_is_released_after_it_landed_is_freed(
    pair: tuple[Worker, Worker],
) -> None:
    prefill, decode = pair
    prefill.thread.post(OpenPush(KEY, decode.agent))
    prefill.thread.post(DeliverTicket(KEY, decode.reserve([1], prefill.agent)))
    prefill.thread.post(FinishPush(KEY, 7, [0]))
    prefill.next(PushEnded)
    decode.next(Arrived)
    decode.thread.post(ReleaseReservation(KEY))
    assert decode.next(ReservationFreed) == ReservationFreed(KEY)


def test_a_reservation_that_no_sender_has_asked_for_is_freed_at_once(make_worker: Maker) -> None:
    decode = make_worker()
    decode.reserve([1], "nobody")
    decode.thread.post(ReleaseReservation(KEY))
    assert decode.next(ReservationFreed) == ReservationFreed(KEY)


def test_a_reservation_whose_sender_died_fails_and_is_freed(make_worker: Maker) -> None:
    decode = make_worker()
    decode.reserve([1], "dead")
    decode.thread.post(SenderDied("dead"))
    assert isinstance(decode.next(ReservationFailed).error, WorkerLost)
    decode.next(ReservationFreed)


def test_a_reservation_that_no_sender_has_asked_for_expires(make_worker: Maker) -> None:
    decode = make_worker()
    decode.reserve([1], "nobody", expires=0.05)
    assert isinstance(decode.next(ReservationFailed).error, DeadlineExceeded)
    assert decode.next(ReservationFreed) == ReservationFreed(KEY)


def test_a_push_cancelled_before_its_ticket_came_frees_the_reservation(
    pair: tuple[Worker, Worker],
) -> None:
    prefill, decode = pair
    prefill.thread.post(OpenPush(KEY, decode.agent))
    decode.reserve([1, 2], prefill.agent)
    decode.thread.post(ReleaseReservation(KEY))
    prefill.thread.post(CancelPush(KEY))
    assert decode.next(ReservationFreed) == ReservationFreed(KEY)


def fetch(
    prefill: Worker, holder: str, pages: list[int], keys: list[bytes], seconds: float = 30.0
) -> None:
    ticket = prefill.ticket(pages, expires=seconds)
    prefill.thread.post(StartFetch(KEY, holder, ticket, pages, keys, seconds))


def test_cached_pages_are_fetched_as_far_as_they_are_there(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    for page in (4, 9):
        decode.fill(page, page)
    fetch(prefill, decode.agent, [20, 21, 7], [b"one", b"two", b"three"])
    wanted = decode.next(PagesWanted)
    assert (wanted.key, wanted.peer) == (KEY, prefill.agent)
    assert wanted.page_keys == (b"one", b"two", b"three")
    decode.thread.post(LendPages(KEY, wanted.peer, wanted.ticket, [4, 9]))
    assert prefill.next(Fetched).pages == 2
    assert prefill.first_bytes() == {20: 4, 21: 9}
    ended = decode.next(PushEnded)
    assert (ended.error, ended.bytes) == (None, 2 * PAGE_BYTES)


def test_pages_pass_both_ways_for_the_same_attempt(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    decode.fill(4, 4)
    fetch(prefill, decode.agent, [20], [b"one"])
    prefill.thread.post(OpenPush(KEY, decode.agent))
    prefill.thread.post(DeliverTicket(KEY, decode.reserve([8], prefill.agent)))
    wanted = decode.next(PagesWanted)
    decode.thread.post(LendPages(KEY, wanted.peer, wanted.ticket, [4]))
    prefill.next(Fetched)
    decode.next(PushEnded)
    prefill.thread.post(FinishPush(KEY, 7, [20]))
    assert decode.next(Arrived) == Arrived(KEY, 7)
    assert prefill.next(PushEnded).error is None
    assert decode.first_bytes() == {4: 4, 8: 4}


def test_a_fetch_that_is_declined_fails_at_once_and_is_freed(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    fetch(prefill, decode.agent, [20], [b"one"])
    decode.thread.post(DeliverTicket(KEY, decode.next(PagesWanted).ticket))
    assert prefill.next(ReservationFailed) == ReservationFailed(KEY, None)
    assert prefill.next(ReservationFreed) == ReservationFreed(KEY)
    assert decode.events.empty()


def test_pages_that_are_lent_too_late_go_nowhere(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    decode.fill(4, 4)
    fetch(prefill, decode.agent, [20], [b"one"], seconds=0.05)
    wanted = decode.next(PagesWanted)
    assert isinstance(prefill.next(ReservationFailed).error, DeadlineExceeded)
    assert prefill.next(ReservationFreed) == ReservationFreed(KEY)
    decode.thread.post(LendPages(KEY, wanted.peer, wanted.ticket, [4]))
    assert isinstance(decode.next(PushEnded).error, Unavailable)
    assert prefill.first_bytes() == {}


def test_a_fetch_from_an_agent_that_was_never_connected_fails_at_once(make_worker: Maker) -> None:
    prefill = make_worker()
    fetch(prefill, "nobody", [20], [b"one"])
    assert isinstance(prefill.next(ReservationFailed).error, WorkerLost)
    assert prefill.next(ReservationFreed) == ReservationFreed(KEY)


def test_an_older_epoch_cannot_land_in_a_newer_reservation(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    old, new = AttemptKey("request", 1), AttemptKey("request", 2)
    prefill.thread.post(OpenPush(old, decode.agent))
    prefill.thread.post(DeliverTicket(old, decode.reserve([1], prefill.agent, key=old)))
    decode.thread.post(ReleaseReservation(old))
    decode.reserve([2], prefill.agent, key=new)
    prefill.thread.post(FinishPush(old, 7, [0]))
    assert decode.next(ReservationFreed) == ReservationFreed(old)
    prefill.next(PushEnded)
    assert decode.events.empty()


def test_a_decode_worker_that_stopped_fails_the_push(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    sealed = decode.reserve([1, 2], prefill.agent)
    decode.thread.stop()
    prefill.thread.post(OpenPush(KEY, decode.agent))
    prefill.thread.post(DeliverTicket(KEY, sealed))
    prefill.thread.post(FinishPush(KEY, 7, [0, 1]))
    agent = decode.thread.pool_address.agent
    events = [prefill.events.get(timeout=10) for _ in range(2)]
    (ended,) = [event for event in events if isinstance(event, PushEnded)]
    assert isinstance(ended.error, WorkerLost)
    assert PeerDisconnected("decode-1", agent) in events


def test_a_push_to_an_agent_that_was_never_connected_fails(make_worker: Maker) -> None:
    prefill, decode = make_worker(), make_worker()
    prefill.thread.post(OpenPush(KEY, decode.agent))
    prefill.thread.post(DeliverTicket(KEY, decode.reserve([1], prefill.agent)))
    prefill.thread.post(FinishPush(KEY, 7, [0]))
    assert isinstance(prefill.next(PushEnded).error, WorkerLost)


def test_a_worker_that_restarted_is_reached_through_its_new_agent(
    make_worker: Maker, pair: tuple[Worker, Worker]
) -> None:
    prefill, _ = pair
    new = make_worker()
    prefill.thread.post(ConnectPeer("decode-1", new.thread.pool_address))
    assert prefill.next(PeerConnected).agent == new.thread.pool_address.agent
    prefill.thread.post(OpenPush(KEY, new.agent))
    prefill.thread.post(DeliverTicket(KEY, new.reserve([1], prefill.agent)))
    prefill.thread.post(FinishPush(KEY, 7, [0]))
    assert new.next(Arrived) == Arrived(KEY, 7)


def test_connecting_to_a_pool_of_another_layout_says_what_differs(make_worker: Maker) -> None:
    prefill = make_worker()
    decode = make_worker(PoolLayout(version=1, model="m", dtype="float32", page_size=8, layers=2))
    prefill.thread.post(ConnectPeer("decode-1", decode.thread.pool_address))
    error = prefill.next(PeerConnected).error
    assert isinstance(error, LayoutMismatch)
    assert "page_size is 16 here and 8 there" in error.message


def test_connecting_to_a_pool_of_another_tickets_says_which(make_worker: Maker) -> None:
    prefill, decode = make_worker(), make_worker()
    address = PoolAddress()
    address.CopyFrom(decode.thread.pool_address)
    address.ticket_version += 1
    prefill.thread.post(ConnectPeer("decode-1", address))
    error = prefill.next(PeerConnected).error
    assert isinstance(error, LayoutMismatch)
    ours, theirs = TICKET_VERSION, TICKET_VERSION + 1
    assert error.message == f"tickets have version {ours} here and {theirs} there"


@pytest.mark.parametrize(("sealed", "error"), [(b"\xff", Internal), (b"", LayoutMismatch)])
def test_a_bad_ticket_fails_the_push(
    make_worker: Maker, sealed: bytes, error: type[Exception]
) -> None:
    prefill = make_worker()
    prefill.thread.post(OpenPush(KEY, "nobody"))
    prefill.thread.post(DeliverTicket(KEY, sealed))
    assert isinstance(prefill.next(PushEnded).error, error)


def test_stopping_ends_every_push(make_worker: Maker) -> None:
    prefill = make_worker()
    prefill.thread.post(OpenPush(KEY, "nobody"))
    prefill.thread.stop()
    assert isinstance(prefill.next(PushEnded).error, Cancelled)


def test_a_pool_that_cannot_be_registered_is_reported_by_start() -> None:
    memory = PoolMemory(0, PAGE_BYTES, PAGES, "abacus")
    thread = TransferThread(InProcessTransport(), memory, LAYOUT, lambda event: None)
    with pytest.raises(InvalidConfig, match="abacus"):
        thread.start()


def test_a_crash_of_the_thread_is_reported() -> None:
    class Broken(InProcessTransport):
        def poll(self) -> list[TransportEvent]:
            raise RuntimeError("torn cable")

    worker = Worker(KINDS["inprocess-cpu"], Broken())
    assert worker.next(TransferCrashed).reason == "RuntimeError: torn cable"
    worker.thread.stop()
