"""CUDA IPC between two processes, where its promises are hardest to keep.

The contract suite holds the transport to everything else; it takes up the GPU
by itself on a machine that has one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from pool_host import PoolHost, poll_until, pool_host
from pools import CUDA, PAGES, Pool

from baton.core.errors import WorkerLost
from baton.kv_transfer.pool_layout import choose_digest
from baton.kv_transfer.transport import Noted, PageWrite, PeerLost, WriteDone, WriteFailed
from baton.v1.transfer_pb2 import CudaIpcRoute, PoolAddress

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")

KIND = "cuda_ipc-cuda"
LARGE_PAGE = 2 << 20


@pytest.fixture(scope="module")
def host() -> Iterator[PoolHost]:
    with pool_host() as started:
        yield started


@pytest.fixture
def source() -> Iterator[Pool]:
    pool = Pool(KIND, LARGE_PAGE)
    yield pool
    pool.transport.close()


def test_large_scattered_pages_arrive_whole_before_their_note(source: Pool, host: PoolHost) -> None:
    target = host.make_pool(KIND, LARGE_PAGE)
    peer = source.transport.connect(target.address)
    for turn in range(5):
        local, remote = (random.sample(range(PAGES), PAGES) for _ in range(2))
        for page in range(PAGES):
            source.fill(page, (page + turn) % 251)
        source.transport.write(PageWrite(peer, local, remote, b"%d" % turn))
        poll_until(
            lambda turn=turn: Noted(source.address.agent, b"%d" % turn) in target.events,
            source,
            target,
        )
        for page, place in zip(local, remote, strict=True):
            found = target.page(place)
            assert found == bytes([(page + turn) % 251]) * LARGE_PAGE
    target.close()


def ends(pool: Pool) -> list[WriteDone | WriteFailed]:
    return [event for event in pool.events if isinstance(event, WriteDone | WriteFailed)]


def test_a_process_killed_under_copies_ends_each_write_once(source: Pool) -> None:
    with pool_host() as host:
        target = host.make_pool(KIND, LARGE_PAGE)
        peer = source.transport.connect(target.address)
        pages = list(range(PAGES))
        numbers = [source.transport.write(PageWrite(peer, pages, pages)) for _ in range(50)]
        host.kill()
        poll_until(lambda: len(ends(source)) == 50 and PeerLost(peer) in source.events, source)
    assert {event.write for event in ends(source)} == set(numbers)
    lost = source.events.index(PeerLost(peer, gone=False))
    failed = [event for event in ends(source) if isinstance(event, WriteFailed)]
    assert all(source.events.index(event) > lost for event in failed)


def test_a_worker_that_died_is_replaced_by_a_new_one(source: Pool) -> None:
    for _ in range(2):
        source.events.clear()
        with pool_host() as host:
            push_to_a_worker_that_dies(source, host)


def push_to_a_worker_that_dies(source: Pool, host: PoolHost) -> None:
    target = host.make_pool(KIND, LARGE_PAGE)
    peer = source.transport.connect(target.address)
    source.fill(0, 9)
    source.transport.write(PageWrite(peer, [0], [5], b"here"))
    poll_until(lambda: target.events, source, target)
    assert target.page(5) == bytes([9]) * LARGE_PAGE
    host.kill()
    poll_until(lambda: PeerLost(peer) in source.events, source)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"host": "elsewhere"}, "another host"),
        ({"handle": bytes(64)}, "cannot be mapped"),
        ({"handle": b"short"}, "cannot be mapped"),
    ],
)
def test_a_peer_out_of_reach_is_refused_with_the_reason(
    source: Pool, host: PoolHost, change: dict[str, object], reason: str
) -> None:
    target = host.make_pool(KIND, LARGE_PAGE)
    with pytest.raises(WorkerLost, match=reason):
        source.transport.connect(with_route(target.address, change))
    assert source.transport.connect(target.address) == target.address.agent
    target.close()


def test_a_gpu_that_is_hidden_here_is_reached_where_the_driver_can(
    source: Pool, host: PoolHost
) -> None:
    target = host.make_pool(KIND, LARGE_PAGE)
    peer = source.transport.connect(with_route(target.address, {"gpu": "GPU-0"}))
    source.fill(0, 9)
    source.transport.write(PageWrite(peer, [0], [5], b"here"))
    poll_until(lambda: target.events, source, target)
    assert target.page(5) == bytes([9]) * LARGE_PAGE
    target.close()


def with_route(address: PoolAddress, change: dict[str, object]) -> PoolAddress:
    """The address with another route to it."""
    route = CudaIpcRoute.FromString(address.routes[0].metadata)
    for name, value in change.items():
        setattr(route, name, value)
    changed = PoolAddress()
    changed.CopyFrom(address)
    changed.routes[0].metadata = route.SerializeToString()
    return changed


def test_a_gpu_finds_a_page_that_was_damaged() -> None:
    pool = Pool(KIND, LARGE_PAGE)
    digest = choose_digest("on", pool.memory)
    assert digest is not None
    pool.fill(3, 7)
    pool.fill(5, 7)
    whole = digest([3, 5, 4])
    assert whole[0] == whole[1] != whole[2]
    pool.fill(5, 8)
    assert digest([3, 5, 4]) == [whole[0], digest([5])[0], whole[2]]
    assert digest([5]) != whole[:1]
    pool.transport.close()


def test_pages_that_are_still_being_made_leave_when_they_are_there(
    source: Pool, host: PoolHost
) -> None:
    target = host.make_pool(KIND, LARGE_PAGE)
    peer = source.transport.connect(target.address)
    made = torch.cuda.Event()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(1_000_000_000)  # half a second
        source.bytes.fill_later(0, LARGE_PAGE, 7)
        made.record()
    late = source.transport.write(PageWrite(peer, [0], [5], b"late", made))
    source.transport.write(PageWrite(peer, [1], [6], b"ready"))
    poll_until(lambda: Noted(source.address.agent, b"ready") in target.events, source, target)
    assert not made.query()
    assert ends(source) == [WriteDone(late + 1)]
    poll_until(lambda: Noted(source.address.agent, b"late") in target.events, source, target)
    assert target.page(5) == bytes([7]) * LARGE_PAGE
    target.close()
