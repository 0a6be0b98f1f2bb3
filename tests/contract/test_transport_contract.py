"""What every transport promises, held against each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy
import pytest
from inprocess_transport import InProcessTransport
from pool_host import AnyPool, PoolHost, poll_until, pool_host
from pools import KINDS, LAYOUT, NIXL, PAGE_BYTES, PAGES, UNTOUCHED, Pool, SplitPool

from baton.core.errors import Internal, LayoutMismatch, WorkerLost
from baton.kv_transfer.transport import Noted, PageWrite, PeerLost, WriteDone, WriteFailed

Maker = Callable[..., AnyPool]
SPANNING = [kind.name for kind in KINDS.values() if kind.spans_processes]
SPLIT = [name for name in ("inprocess-cpu", "nixl-cpu", "cuda_ipc-cuda") if name in KINDS]


@pytest.fixture(scope="module")
def host() -> Iterator[PoolHost]:
    with pool_host() as started:
        yield started


@pytest.fixture(
    params=[
        *(pytest.param((name, False), id=name) for name in KINDS),
        *(pytest.param((name, True), id=f"{name}-two-processes") for name in SPANNING),
        *(
            pytest.param((name, split), id=f"{name}-{split[0]}-to-{split[1]}")
            for name in SPLIT
            for split in [(1, 2), (2, 1), (2, 2)]
        ),
    ]
)
def make_pool(request: pytest.FixtureRequest) -> Iterator[Maker]:
    """Makes pools of one kind. With two processes, the second pool is in the other one. With a
    split, the second pool's heads are split in another way than those of the others."""
    kind, arrangement = request.param
    pools: list[AnyPool] = []

    def make(page_bytes: int = PAGE_BYTES) -> AnyPool:
        if isinstance(arrangement, tuple):
            pools.append(SplitPool(kind, arrangement[len(pools) % 2], page_bytes))
        elif arrangement and len(pools) == 1:
            pools.append(request.getfixturevalue("host").make_pool(kind, page_bytes))
        else:
            pools.append(Pool(kind, page_bytes))
        return pools[-1]

    yield make
    for pool in pools:
        pool.transport.close()


def notes(pool: AnyPool) -> list[Noted]:
    return [event for event in pool.events if isinstance(event, Noted)]


def ended(pool: AnyPool, write: int) -> list[WriteDone | WriteFailed]:
    return [e for e in pool.events if isinstance(e, WriteDone | WriteFailed) and e.write == write]


def write(
    source: AnyPool, target: AnyPool, local: list[int], remote: list[int], note: bytes = b""
) -> int:
    peer = source.transport.connect(target.address)
    number = source.transport.write(PageWrite(peer, local, remote, note))
    poll_until(lambda: ended(source, number), source, target)
    return number


def test_pages_arrive_exactly_and_nothing_else_is_touched(make_pool: Maker) -> None:
    source, target = make_pool(), make_pool()
    pairs = {3: 10, 4: 11, 5: 12, 9: 40, 8: 41, 63: 0}
    for local in pairs:
        source.fill(local, local)
    number = write(source, target, list(pairs), list(pairs.values()))
    assert ended(source, number) == [WriteDone(number)]
    expected = {remote: bytes([local]) * PAGE_BYTES for local, remote in pairs.items()}
    untouched = bytes([UNTOUCHED]) * PAGE_BYTES
    assert [target.page(i) for i in range(PAGES)] == [
        expected.get(i, untouched) for i in range(PAGES)
    ]


def test_a_note_is_heard_only_when_the_bytes_of_its_write_are_in_place(make_pool: Maker) -> None:
    source, target = make_pool(), make_pool()
    peer = source.transport.connect(target.address)
    for round_ in range(20):
        pages = list(range(PAGES))
        for page in pages:
            source.fill(page, round_)
        source.transport.write(PageWrite(peer, pages, pages[::-1], b"round %d" % round_))
        poll_until(lambda wanted=round_: len(notes(target)) == wanted + 1, source, target)
        assert all(target.page(page) == bytes([round_]) * PAGE_BYTES for page in pages)
    assert [noted.peer for noted in notes(target)] == [source.address.agent] * 20


def test_a_note_can_be_sent_without_pages(make_pool: Maker) -> None:
    source, target = make_pool(), make_pool()
    number = write(source, target, [], [], b"alone")
    poll_until(lambda: notes(target), source, target)
    assert [noted.note for noted in notes(target)] == [b"alone"]
    assert ended(source, number) == [WriteDone(number)]


def test_a_write_without_a_note_is_silent(make_pool: Maker) -> None:
    source, target = make_pool(), make_pool()
    write(source, target, [1], [2])
    write(source, target, [], [], b"end")
    poll_until(lambda: notes(target), source, target)
    assert [noted.note for noted in notes(target)] == [b"end"]


def test_every_write_ends_exactly_once(make_pool: Maker) -> None:
    source, target = make_pool(), make_pool()
    peer = source.transport.connect(target.address)
    numbers = [source.transport.write(PageWrite(peer, [i], [i], b"%d" % i)) for i in range(30)]
    poll_until(lambda: len(notes(target)) == 30, source, target)
    poll_until(lambda: all(ended(source, number) for number in numbers), source, target)
    assert [ended(source, number) for number in numbers] == [[WriteDone(n)] for n in numbers]


def test_both_sides_can_write_to_each_other(make_pool: Maker) -> None:
    left, right = make_pool(), make_pool()
    left.fill(0, 1)
    right.fill(0, 2)
    write(left, right, [0], [5])
    write(right, left, [0], [5])
    assert (left.page(5)[0], right.page(5)[0]) == (2, 1)


def test_connecting_twice_changes_nothing(make_pool: Maker) -> None:
    source, target = make_pool(), make_pool()
    assert source.transport.connect(target.address) == target.address.agent
    write(source, target, [0], [0])
    assert source.transport.connect(target.address) == target.address.agent
    write(source, target, [0], [0])


def test_a_peer_with_other_page_sizes_is_refused(make_pool: Maker) -> None:
    source, target = make_pool(), make_pool(page_bytes=2 * PAGE_BYTES)
    with pytest.raises(LayoutMismatch, match="4096 bytes here and 8192 bytes"):
        source.transport.connect(target.address)


def test_a_write_to_an_unknown_peer_is_refused(make_pool: Maker) -> None:
    source = make_pool()
    with pytest.raises(WorkerLost, match="nobody"):
        source.transport.write(PageWrite("nobody", [0], [0]))


def test_a_write_to_a_disconnected_peer_is_refused(make_pool: Maker) -> None:
    source, target = make_pool(), make_pool()
    write(source, target, [0], [0])
    source.transport.disconnect(target.address.agent)
    source.transport.disconnect(target.address.agent)
    with pytest.raises(WorkerLost):
        source.transport.write(PageWrite(target.address.agent, [0], [0]))


@pytest.mark.parametrize(
    ("local", "remote"), [([PAGES], [0]), ([0], [PAGES]), ([-1], [0]), ([0, 1], [0])]
)
def test_pages_outside_of_a_pool_are_refused(
    make_pool: Maker, local: list[int], remote: list[int]
) -> None:
    source, target = make_pool(), make_pool()
    peer = source.transport.connect(target.address)
    with pytest.raises(Internal):
        source.transport.write(PageWrite(peer, local, remote))


def test_a_peer_that_closed_is_lost_before_its_write_fails(make_pool: Maker) -> None:
    source, target = make_pool(), make_pool()
    write(source, target, [0], [0])
    target.transport.close()
    peer = target.address.agent
    number = source.transport.write(PageWrite(peer, [0], [1], b"never heard"))
    poll_until(lambda: ended(source, number), source)
    first, *later = [e for e in source.events if not isinstance(e, WriteDone)]
    assert isinstance(first, PeerLost)
    assert first.peer == peer
    # It may have become certain meanwhile that it is gone.
    failed = next(event for event in later if event != PeerLost(peer, gone=True))
    assert isinstance(failed, WriteFailed)
    assert isinstance(failed.error, WorkerLost)
    assert target.page(1) == bytes([UNTOUCHED]) * PAGE_BYTES
    with pytest.raises(WorkerLost):
        source.transport.write(PageWrite(peer, [0], [0]))


def test_connecting_to_an_agent_that_is_gone_is_refused(make_pool: Maker) -> None:
    source, target = make_pool(), make_pool()
    target.transport.close()
    with pytest.raises(WorkerLost):
        source.transport.connect(target.address)


def test_closing_twice_is_fine_and_leaves_the_peer_working(make_pool: Maker) -> None:
    source, target, third = make_pool(), make_pool(), make_pool()
    write(source, target, [0], [0])
    source.transport.close()
    source.transport.close()
    write(third, target, [0], [0])


@pytest.mark.skipif(not NIXL, reason="needs NIXL (pip install nixl, on Linux)")
@pytest.mark.parametrize(
    ("pages", "descriptors"),
    [([4, 5, 6, 7], 1), ([4, 5, 9, 10], 2), ([4, 6, 8], 3)],
)
def test_nixl_itself_merges_neighbouring_pages_of_a_prepared_list(
    pages: list[int], descriptors: int
) -> None:
    import nixl

    settings = nixl.nixl_agent_config(enable_prog_thread=False, capture_telemetry=True)
    agent = nixl.nixl_agent("loop", settings)
    buffer = numpy.zeros(PAGES * PAGE_BYTES, dtype=numpy.uint8)
    base = buffer.ctypes.data
    registration = agent.register_memory([(base, buffer.nbytes, 0, "")], "DRAM")
    rows = numpy.array([[base, PAGE_BYTES, 0, PAGE_BYTES, PAGES]], dtype=numpy.uint64)
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows, "DRAM")
    remote = agent.prep_xfer_dlist("loop", rows, "DRAM")
    transfer = agent.make_prepped_xfer("WRITE", local, pages, remote, [20 + p for p in pages])
    state = agent.transfer(transfer)
    while state == "PROC":
        state = agent.check_xfer_state(transfer)
    assert state == "DONE"
    assert agent.get_xfer_telemetry(transfer).descCount == descriptors
    for handle in (transfer, local, remote):
        handle.release()
    agent.deregister_memory(registration)


@pytest.mark.parametrize("kind", SPANNING)
def test_a_killed_process_is_found_lost(kind: str) -> None:
    source = Pool(kind)
    with pool_host() as host:
        target = host.make_pool(kind, PAGE_BYTES)
        write(source, target, [7, 8], [20, 21], b"20")
        peer = target.address.agent
        host.kill()
        number = source.transport.write(
            PageWrite(peer, list(range(PAGES)), list(range(PAGES)), b"0")
        )
        poll_until(lambda: ended(source, number), source)
        poll_until(lambda: PeerLost(peer, gone=True) in source.events, source)
    assert isinstance(ended(source, number)[0], WriteFailed)
    assert {e.peer for e in source.events if isinstance(e, PeerLost)} == {peer}
    with pytest.raises(WorkerLost):
        source.transport.write(PageWrite(peer, [0], [0]))
    source.transport.close()


class Signal:
    """A moment that comes when the test says so."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


@pytest.mark.skipif(not NIXL, reason="needs NIXL (pip install nixl, on Linux)")
def test_a_write_reads_no_page_before_its_moment() -> None:
    source, target, moment = Pool("nixl-cpu"), Pool("nixl-cpu"), Signal()
    peer = source.transport.connect(target.address)
    number = source.transport.write(PageWrite(peer, [1], [2], b"made", moment))
    write(source, target, [3], [3], b"another")  # does not wait behind it
    source.fill(1, 7)
    assert ended(source, number) == []
    moment.passed = True
    poll_until(lambda: len(notes(target)) == 2, source, target)
    assert target.page(2) == bytes([7]) * PAGE_BYTES
    assert [noted.note for noted in notes(target)] == [b"another", b"made"]
    for pool in (source, target):
        pool.transport.close()


@pytest.mark.skipif(not NIXL, reason="needs NIXL (pip install nixl, on Linux)")
def test_a_write_that_waits_for_its_moment_fails_with_its_peer() -> None:
    source = Pool("nixl-cpu")
    with pool_host() as mortal:
        target = mortal.make_pool("nixl-cpu", PAGE_BYTES)
        peer = source.transport.connect(target.address)
        number = source.transport.write(PageWrite(peer, [1], [2], b"", Signal()))
        mortal.kill()
        poke = source.transport.write(PageWrite(peer, [], [], b"are you there"))
        poll_until(lambda: ended(source, poke), source)
        while ended(source, number) == []:
            with contextlib.suppress(WorkerLost):
                source.transport.write(PageWrite(peer, [4], [4], b""))
            source.events += source.transport.poll()
    assert [type(event) for event in ended(source, number)] == [WriteFailed]
    source.transport.close()


def test_a_lost_peer_is_connected_anew_only_when_its_loss_was_told() -> None:
    source, target = Pool("inprocess-cpu"), Pool("inprocess-cpu")
    peer = source.transport.connect(target.address)
    target.transport.close()
    source.transport.write(PageWrite(peer, [0], [1]))
    again = InProcessTransport(peer)
    address = again.register(target.memory, LAYOUT)
    with pytest.raises(WorkerLost, match="has just been lost"):
        source.transport.connect(address)
    assert PeerLost(peer) in source.transport.poll()
    assert source.transport.connect(address) == peer
    for transport in (source.transport, again):
        transport.close()
