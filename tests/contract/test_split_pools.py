"""Pages between pools that split a model's heads: what goes where, and what counts as done."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
from pool_host import AnyPool, HostedPool, poll_until, pool_host
from pools import KINDS, LAYOUT, PAGE_BYTES, PAGES, UNTOUCHED, Shard, SplitPool
from transfer_workers import TransferWorker

from baton.core.errors import WorkerLost
from baton.core.types import AttemptKey
from baton.kv_transfer.shard_process import ShardProxy
from baton.kv_transfer.sharded_transport import PROBE, ShardedTransport
from baton.kv_transfer.transfer_events import (
    Arrived,
    ConnectPeer,
    DeliverTicket,
    Fetched,
    FinishPush,
    LendPages,
    OpenPush,
    PagesWanted,
    PeerConnected,
    PushEnded,
    StartFetch,
)
from baton.kv_transfer.transport import (
    Noted,
    PageWrite,
    PeerLost,
    TransportEvent,
    WriteDone,
    WriteFailed,
)
from baton.v1.transfer_pb2 import PoolAddress, PoolShard

SPLITS = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (4, 1)]
KINDS_HERE = [name for name in ("inprocess-cpu", "nixl-cpu", "cuda_ipc-cuda") if name in KINDS]


@pytest.fixture
def pools() -> Iterator[Callable[[str, int], SplitPool]]:
    made: list[SplitPool] = []

    def make(kind: str, shards: int) -> SplitPool:
        made.append(SplitPool(kind, shards))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


Pools = Callable[[str, int], SplitPool]


def poll_for(seconds: float, *pools: AnyPool) -> None:
    until = time.monotonic() + seconds
    poll_until(lambda: time.monotonic() >= until, *pools)


def noted(pool: SplitPool) -> list[bytes]:
    return [event.note for event in pool.events if isinstance(event, Noted)]


@pytest.mark.parametrize("kind", KINDS_HERE)
@pytest.mark.parametrize(("ours", "theirs"), SPLITS)
def test_every_byte_of_a_page_goes_to_its_head_and_nowhere_else(
    pools: Pools, kind: str, ours: int, theirs: int
) -> None:
    source, target = pools(kind, ours), pools(kind, theirs)
    chance = random.Random(ours * 10 + theirs)
    pairs = {3: 10, 4: 11, 9: 40, 63: 0}
    sent = {remote: chance.randbytes(PAGE_BYTES) for remote in pairs.values()}
    for local, remote in pairs.items():
        source.set_page(local, sent[remote])
    peer = source.transport.connect(target.address)
    number = source.transport.write(PageWrite(peer, list(pairs), list(pairs.values()), b"arrived"))
    poll_until(lambda: noted(target), source, target)
    poll_until(lambda: WriteDone(number) in source.events, source, target)
    untouched = bytes([UNTOUCHED]) * PAGE_BYTES
    for page in range(PAGES):
        assert target.page(page) == sent.get(page, untouched), page


@pytest.mark.parametrize(("ours", "theirs"), SPLITS)
def test_a_page_has_the_same_digest_however_it_is_split(
    pools: Pools, ours: int, theirs: int
) -> None:
    source, target = pools("inprocess-cpu", ours), pools("inprocess-cpu", theirs)
    page = bytearray(random.Random(0).randbytes(PAGE_BYTES))
    source.set_page(1, page)
    source.set_page(2, page[::-1])
    peer = source.transport.connect(target.address)
    back = target.transport.connect(source.address)
    source.transport.write(PageWrite(peer, [1, 2], [7, 8], b"arrived"))
    poll_until(lambda: noted(target), source, target)
    sent = source.sharded.digests(peer, [1, 2])
    assert sent[0] != sent[1]
    assert target.sharded.digests(back, [7, 8]) == sent
    page[-1] ^= 1
    target.set_page(7, page)
    damaged, sound = target.sharded.digests(back, [7, 8])
    assert damaged != sent[0]
    assert sound == sent[1]


class Worker(TransferWorker):
    """One with a split pool."""

    def __init__(self, shards: int) -> None:
        self.pool = SplitPool("inprocess-cpu", shards, registered=False)
        transport, memory = self.pool.transport, self.pool.memory
        super().__init__(transport, memory, LAYOUT, self.pool.sharded.digests, 10.0)


@pytest.fixture(params=[(1, 2), (2, 1), (2, 2)], ids=lambda split: f"{split[0]}-to-{split[1]}")
def workers(request: pytest.FixtureRequest) -> Iterator[tuple[Worker, Worker]]:
    """A prefill worker that is connected to a decode worker."""
    prefill, decode = (Worker(shards) for shards in request.param)
    prefill.thread.post(ConnectPeer("decode-0", decode.thread.pool_address))
    assert prefill.next(PeerConnected).error is None
    yield prefill, decode
    for worker in (prefill, decode):
        worker.thread.stop()


def test_a_prompt_lands_in_a_pool_of_another_split_and_is_fetched_back(
    workers: tuple[Worker, Worker],
) -> None:
    prefill, decode = workers
    push, back = AttemptKey("request", 1), AttemptKey("fetch", 1)
    content = random.Random(1).randbytes(PAGE_BYTES)
    prefill.pool.set_page(1, content)
    prefill.thread.post(OpenPush(push, decode.agent))
    prefill.thread.post(DeliverTicket(push, decode.reserve([20], prefill.agent, key=push)))
    prefill.thread.post(FinishPush(push, 77, [1]))
    assert decode.next(Arrived) == Arrived(push, 77)
    assert decode.pool.page(20) == content
    ended = prefill.next(PushEnded)
    assert (ended.error, ended.bytes) == (None, PAGE_BYTES)
    ticket = prefill.ticket([9], back)
    prefill.thread.post(StartFetch(back, decode.agent, ticket, [9], [b"key"], 10.0))
    wanted = decode.next(PagesWanted)
    decode.thread.post(LendPages(back, wanted.peer, wanted.ticket, [20]))
    assert prefill.next(Fetched).pages == 1
    assert prefill.pool.page(9) == content


class Gate:
    """Stands between a worker's first process and another one, and holds commands back."""

    def __init__(self, shard: socket.socket) -> None:
        self.end, self._near = socket.socketpair()
        self._far = shard
        self.open = threading.Event()
        self.open.set()
        for source, target in ((self._near, self._far), (self._far, self._near)):
            threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def cut(self) -> None:
        self._near.shutdown(socket.SHUT_RDWR)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(4096):
                self.open.wait()
                target.sendall(piece)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def gated() -> Iterator[tuple[ShardedTransport, Gate]]:
    """The transport of a pool in two halves, the second behind a gate."""
    own, other = (Shard("inprocess-cpu", rank, 2) for rank in range(2))
    gate = Gate(other.serve())
    transport = ShardedTransport(
        own.transport, own.heads, [ShardProxy(Connection(gate.end.detach()))]
    )
    transport.register(own.memory, LAYOUT)
    yield transport, gate
    gate.open.set()
    transport.close()
    other.join()


def test_a_note_waits_for_the_pages_of_every_process(
    pools: Pools, gated: tuple[ShardedTransport, Gate]
) -> None:
    (first, gate), target = gated, pools("inprocess-cpu", 1)
    peer = first.connect(target.address)
    gate.open.clear()
    number = first.write(PageWrite(peer, [1], [2], b"arrived"))
    for _ in range(20):
        assert first.poll() == []
        target.events += target.transport.poll()
    assert noted(target) == []
    gate.open.set()
    events: list[TransportEvent] = []
    while WriteDone(number) not in events:
        events += first.poll()
    target.events += target.transport.poll()
    assert noted(target) == [b"arrived"]


def test_a_write_fails_only_when_no_process_writes_any_more(
    pools: Pools, gated: tuple[ShardedTransport, Gate]
) -> None:
    (first, gate), target = gated, pools("inprocess-cpu", 2)
    peer = first.connect(target.address)
    gate.open.clear()
    number = first.write(PageWrite(peer, [1], [2], b"never heard"))
    target.shards[0].transport.close()
    again = first.write(PageWrite(peer, [3], [4]))
    events = [event for _ in range(20) for event in first.poll()]
    assert events == [PeerLost(peer, gone=False)]
    gate.open.set()
    while len(events) < 3:
        events += first.poll()
    failed = [event.write for event in events if isinstance(event, WriteFailed)]
    assert sorted(failed) == sorted([number, again])


def test_a_peer_is_gone_only_when_all_its_processes_are(pools: Pools) -> None:
    source, target = pools("inprocess-cpu", 1), pools("inprocess-cpu", 2)
    peer = source.transport.connect(target.address)
    target.shards[1].transport.close()
    source.transport.write(PageWrite(peer, [1], [2]))
    poll_until(lambda: PeerLost(peer, gone=False) in source.events, source)
    poll_for(0.5, source)  # time for a probe or two
    assert PeerLost(peer, gone=True) not in source.events
    with pytest.raises(WorkerLost):
        source.transport.write(PageWrite(peer, [1], [2]))
    target.shards[0].transport.close()
    poll_until(lambda: PeerLost(peer, gone=True) in source.events, source)


class Later:
    """A moment that comes when the test says so."""

    passed = False

    def query(self) -> bool:
        return self.passed


@pytest.mark.skipif("nixl-cpu" not in KINDS, reason="needs NIXL (pip install nixl, on Linux)")
def test_no_process_sends_pages_that_are_not_made_yet(pools: Pools) -> None:
    source, target = pools("nixl-cpu", 2), pools("nixl-cpu", 2)
    peer = source.transport.connect(target.address)
    made = Later()
    source.transport.write(PageWrite(peer, [3], [5], b"arrived", made))
    poll_for(0.02, source, target)
    assert noted(target) == []
    assert target.page(5) == bytes([UNTOUCHED]) * PAGE_BYTES
    source.set_page(3, bytes([7]) * PAGE_BYTES)
    made.passed = True
    poll_until(lambda: noted(target), source, target)
    assert target.page(5) == bytes([7]) * PAGE_BYTES


def test_probes_are_not_heard(pools: Pools) -> None:
    source, target = pools("inprocess-cpu", 1), pools("inprocess-cpu", 2)
    peer = source.transport.connect(target.address)
    target.shards[1].transport.close()
    source.transport.write(PageWrite(peer, [1], [2]))
    poll_for(0.5, source, target)
    assert target.events == []


def test_a_process_that_ends_takes_its_worker_along(
    pools: Pools, gated: tuple[ShardedTransport, Gate]
) -> None:
    (first, gate), target = gated, pools("inprocess-cpu", 1)
    peer = first.connect(target.address)
    gate.cut()
    first.write(PageWrite(peer, [1], [2]))
    with pytest.raises(WorkerLost, match="a rank of this worker cannot be reached"):
        first.poll()


def test_a_peer_that_is_half_out_of_reach_is_not_connected(pools: Pools) -> None:
    source, target = pools("inprocess-cpu", 1), pools("inprocess-cpu", 2)
    target.shards[1].transport.close()
    with pytest.raises(WorkerLost):
        source.transport.connect(target.address)
    with pytest.raises(WorkerLost, match="not connected"):
        source.transport.write(PageWrite(target.address.agent, [1], [2]))


@pytest.mark.skipif("nixl-cpu" not in KINDS, reason="needs NIXL (pip install nixl, on Linux)")
def test_a_worker_is_gone_when_the_last_of_its_processes_was_killed() -> None:
    source = SplitPool("nixl-cpu", 1)
    with pool_host() as first, pool_host() as second:
        halves = [host.make_pool("nixl-cpu", PAGE_BYTES // 2) for host in (first, second)]
        whole = address_of(halves)
        peer = source.transport.connect(whole)
        number = source.transport.write(PageWrite(peer, [7], [20], b"arrived"))
        poll_until(lambda: WriteDone(number) in source.events, source, *halves)
        second.kill()
        source.transport.write(PageWrite(peer, [7], [20], b"never heard"))
        poll_until(lambda: PeerLost(peer, gone=False) in source.events, source, halves[0])
        poll_for(0.5, source, halves[0])
        assert PeerLost(peer, gone=True) not in source.events
        first.kill()
        poll_until(lambda: PeerLost(peer, gone=True) in source.events, source)
    heard = {event.note for event in halves[0].events if isinstance(event, Noted)}
    assert heard == {b"arrived", PROBE}
    source.close()


def address_of(halves: list[HostedPool]) -> PoolAddress:
    """Two pools as the halves of one."""
    heads = LAYOUT.kv_heads // 2
    shards = [
        PoolShard(first_head=rank * heads, heads=heads, pool=half.address)
        for rank, half in enumerate(halves)
    ]
    first = halves[0].address
    sizes = {"page_bytes": PAGE_BYTES, "total_pages": first.total_pages}
    return PoolAddress(agent=first.agent, layout=LAYOUT, shards=shards, **sizes)
