"""What the seeds have found, each as short as it can be told, or as its seed."""

from __future__ import annotations

import pytest

from baton.core.config import Config
from baton.core.errors import QuarantineFull, Unavailable
from baton.core.types import AttemptKey, Role, Sampling, Work
from baton.core.wire import work_to
from baton.kv_transfer.receiver import ReceiverState
from baton.kv_transfer.transfer_events import (
    ConnectPeer,
    ExpectPages,
    PeerConnected,
    ReleaseReservation,
    ReservationFailed,
    ReservationFreed,
    ReservationOverdue,
    SenderDied,
    TransferEvent,
)
from baton.kv_transfer.transfer_protocol import pack_note
from baton.kv_transfer.transfer_thread import LINGER_SECONDS, TransferThread
from baton.kv_transfer.transport import Noted, PoolMemory
from baton.v1 import worker_pb2 as pb
from baton.v1.transfer_pb2 import Beat, Introduction, PoolAddress, TransferNote

from .cluster import Cluster
from .fabric import Fabric, SimulatedTransport
from .router import SimulatedRouter
from .streams import Stream
from .worker import LAYOUT, SimulatedWorker
from .world import World

KEY = AttemptKey("request", 1)


def beat_note(key: AttemptKey, number: int) -> bytes:
    return pack_note(key, TransferNote(beat=Beat(number=number)))


def introduction_note(pool: PoolAddress) -> bytes:
    return TransferNote(introduction=Introduction(pool=pool)).SerializeToString()


class Side:
    """A transfer thread that is driven by hand, and what it tells its worker."""

    def __init__(self, world: World, fabric: Fabric, agent: str) -> None:
        self.transport = SimulatedTransport(fabric, agent, [[0], [0]])
        self.events: list[TransferEvent] = []
        memory = PoolMemory(0, 8, 2, "cpu")
        self.thread = TransferThread(
            self.transport, memory, LAYOUT, self.events.append, clock=world.clock
        )
        self.thread.open()

    def hear(self, peer: Side, *notes: bytes) -> None:
        """All of them in one poll."""
        for note in notes:
            self.transport.hear(Noted(peer.transport.agent, note))
        self.thread.step(0.0)

    @property
    def reservation(self) -> ReceiverState:
        return self.thread._transfers._receivers[KEY].state


def sides() -> tuple[Fabric, Side, Side]:
    world = World(0)
    fabric = Fabric(world, lambda write: None)
    return fabric, Side(world, fabric, "prefill"), Side(world, fabric, "decode")


def test_a_beat_that_cannot_be_answered_opens_nothing() -> None:
    _, prefill, decode = sides()
    decode.thread.post(ExpectPages(KEY, "prefill", [0], 60.0))
    decode.hear(prefill, beat_note(KEY, 1))
    assert decode.reservation is ReceiverState.RESERVED
    decode.thread.post(ReleaseReservation(KEY))
    decode.thread.step(0.0)
    assert decode.events == [ReservationFreed(KEY)]


def test_a_lost_connection_is_not_replaced_before_its_loss_is_told() -> None:
    fabric, prefill, decode = sides()
    introduction = introduction_note(prefill.thread.pool_address)
    decode.thread.post(ExpectPages(KEY, "prefill", [0], 60.0))
    decode.hear(prefill, introduction)
    fabric.cut(prefill.transport, decode.transport)
    # The first answer finds the connection broken, and the loss frees the
    # pages: no answer after it may be given on a new connection.
    decode.hear(prefill, beat_note(KEY, 1), introduction, beat_note(KEY, 2))
    decode.thread.step(0.0)
    assert ReservationFreed(KEY) in decode.events
    fabric.world.run(until=60.0)
    assert prefill.transport.poll() == []


def pass_time(fabric: Fabric, side: Side, seconds: float) -> None:
    """Lets time pass for one side alone, in the steps that it asks for."""
    until = fabric.world.now + seconds
    side.thread.step(0.0)
    while fabric.world.now < until:
        fabric.world.now = min(max(side.thread.deadline, fabric.world.now + 0.1), until)
        side.thread.step(0.0)


def test_a_decode_worker_counts_as_connected_once_it_has_answered() -> None:
    fabric, prefill, decode = sides()
    prefill.thread.post(ConnectPeer("decode0", decode.thread.pool_address))
    pass_time(fabric, prefill, 4.0)
    assert prefill.events == []
    pass_time(fabric, prefill, 2.0)
    [silent] = prefill.events
    assert isinstance(silent, PeerConnected)
    assert isinstance(silent.error, Unavailable)
    prefill.thread.post(ConnectPeer("decode0", decode.thread.pool_address))
    prefill.thread.step(0.0)
    fabric.world.run(until=fabric.world.now + 60.0)
    for side in (decode, prefill):
        side.thread.step(0.0)
        fabric.world.run(until=fabric.world.now + 60.0)
    prefill.thread.step(0.0)
    assert prefill.events[-1] == PeerConnected("decode0", "decode", None)


def test_what_a_dead_process_has_sent_is_waited_for() -> None:
    fabric, prefill, decode = sides()
    decode.thread.post(ExpectPages(KEY, "prefill", [0], 6000.0))
    decode.hear(prefill, introduction_note(prefill.thread.pool_address), beat_note(KEY, 1))
    decode.thread.post(ReleaseReservation(KEY))
    decode.thread.post(SenderDied("prefill"))
    pass_time(fabric, decode, LINGER_SECONDS - 1.0)
    assert decode.reservation is ReceiverState.QUARANTINED
    pass_time(fabric, decode, 2.0)
    assert decode.events[-1] == ReservationFreed(KEY)


class Decode:
    """A decode worker that is driven by hand, and what it tells its router."""

    def __init__(self) -> None:
        world = World(0)
        fabric = Fabric(world, lambda write: None)
        self.worker = SimulatedWorker(
            *(world, fabric, "decode0", Role.DECODE, Config(page_size=2)),
            pages=4,
            digests=False,
            incarnation=1,
        )
        self.role = self.worker.role
        router = SimulatedRouter(world, "router", lambda router, name: None)
        stream = Stream(world, router, self.worker, 1)
        self.sent: list[pb.WorkerMessage] = []
        stream.to_router = self.sent.append  # type: ignore[assignment, method-assign]
        self.worker.attach(stream)

    def reserve(self, key: AttemptKey, tokens: int) -> None:
        work = Work(key, [1] * tokens, Sampling(), 2, frozenset())
        self.role.on_message(1, pb.RouterMessage(reserve=pb.Reserve(work=work_to(work))), 0.0)
        self.role.step()

    @property
    def told(self) -> list[str | None]:
        return [message.WhichOneof("kind") for message in self.sent]


def test_decode_leaves_it_to_prefill_to_say_why_it_gave_up() -> None:
    decode = Decode()
    decode.reserve(KEY, tokens=3)
    decode.role.on_transfer(ReservationFailed(KEY, None))
    decode.role.on_transfer(ReservationFreed(KEY))
    assert decode.told == ["welcome", "reserved"]
    assert decode.role.idle
    assert decode.worker.engine.pool.leased == 0


def test_pages_that_are_about_to_be_freed_do_not_count_as_quarantined() -> None:
    decode = Decode()
    decode.reserve(KEY, tokens=6)
    decode.role.on_transfer(ReservationFailed(KEY, Unavailable("silent")))
    assert decode.role.load().quarantined_pages == 0
    decode.reserve(AttemptKey("other", 1), tokens=2)
    assert decode.told == ["welcome", "reserved", "failed", "reserved"]


def test_a_worker_over_its_quarantine_budget_says_so_and_refuses_until_it_is_under_it() -> None:
    decode = Decode()
    decode.reserve(KEY, tokens=6)
    decode.role.on_transfer(ReservationFailed(KEY, Unavailable("silent")))
    decode.role.on_transfer(ReservationOverdue(KEY))
    load = decode.role.load()
    assert (load.quarantined_pages, load.leased_pages) == (3, 0)
    assert load.fault == "3 of 4 pages are in quarantine, more than 50%"
    decode.reserve(AttemptKey("refused", 1), tokens=2)
    refusal = decode.sent[-1].failed
    assert (refusal.reason, refusal.retry) == (QuarantineFull.reason, True)
    decode.role.on_transfer(ReservationFreed(KEY))
    assert decode.role.load().fault == ""
    decode.reserve(AttemptKey("taken", 1), tokens=2)
    assert decode.told[-1] == "reserved"


@pytest.mark.parametrize(
    ("seed", "split"),
    [
        # Refused by a full quarantine again and again, then lost with its worker.
        (21184, False),
        # A push that ended with a link of the second shards, of which the receiver knew nothing.
        (1577, True),
    ],
)
def test_a_seed_that_broke_an_invariant_breaks_none(seed: int, split: bool) -> None:
    Cluster(seed, split=split).run()
