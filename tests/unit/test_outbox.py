from __future__ import annotations

import asyncio

from second_tiers import TieredPool, keys

from baton.core.page_keys import page_keys, salted_root
from baton.engine.page_pool import PagePool
from baton.router.placement.worker_state import CacheIndex
from baton.v1 import worker_pb2 as pb
from baton.worker.outbox import CACHE_BACKLOG, MOST_KEYS, CacheFeed, Outbox

Queue = asyncio.Queue[pb.WorkerMessage | None]


class Bench:
    """A pool with one-token pages, and one router that is attached."""

    def __init__(self, pages: int = 8) -> None:
        self.pool = PagePool(pages, 1, root=b"root")
        self.outbox = Outbox(asyncio.get_running_loop())
        self.feed = CacheFeed(self.pool, self.outbox)
        self.router = self.outbox.attach(1)

    def fill(self, tokens: list[int]) -> list[bytes]:
        keys = page_keys(salted_root(b"root", ""), tokens, 1)
        with self.pool.acquire(len(tokens), keys) as lease:
            lease.name(keys)
        return keys

    async def told(self, router: Queue | None = None) -> list[pb.CacheEvents]:
        self.outbox.flush()
        await asyncio.sleep(0)
        queue, events = router or self.router, []
        while not queue.empty():
            message = queue.get_nowait()
            assert message is not None
            events.append(message.cache_events)
        return events


async def test_what_came_and_went_is_told_once_and_parents_come_first() -> None:
    bench = Bench(3)
    keys = bench.fill([1, 2, 3])
    bench.feed.publish(busy=False)
    bench.feed.publish(busy=False)
    assert await bench.told() == [pb.CacheEvents(number=1, stored=keys)]
    bench.pool.acquire(1)
    bench.feed.publish(busy=False)
    assert await bench.told() == [pb.CacheEvents(number=2, evicted=keys[2:])]


async def test_a_busy_engine_tells_little_things_together() -> None:
    bench = Bench()
    bench.fill([1])
    bench.feed.publish(busy=True)
    assert len(await bench.told()) == 1
    bench.fill([2])
    bench.feed.publish(busy=True)
    assert await bench.told() == []
    bench.fill([3])
    bench.feed.publish(busy=False)
    (events,) = await bench.told()
    assert (events.number, len(events.stored)) == (2, 2)


async def test_much_is_told_at_once() -> None:
    bench = Bench(MOST_KEYS + 1)
    bench.fill([1])
    bench.feed.publish(busy=True)
    bench.fill(list(range(2, MOST_KEYS + 2)))
    bench.feed.publish(busy=True)
    assert [len(events.stored) for events in await bench.told()] == [1, MOST_KEYS]


async def test_a_router_that_asks_is_told_everything_and_what_follows_has_the_next_number() -> None:
    bench = Bench()
    keys = bench.fill([1, 2])
    late = bench.outbox.attach(2)
    bench.feed.send_all(2)
    assert await bench.told() == [pb.CacheEvents(number=1, stored=keys)]
    assert await bench.told(late) == [
        pb.CacheEvents(number=1, stored=keys),
        pb.CacheEvents(number=1, reset=True, stored=keys),
    ]
    more = bench.fill([3])
    bench.feed.publish(busy=False)
    assert await bench.told(late) == [pb.CacheEvents(number=2, stored=more)]


async def test_a_slow_router_is_not_told_and_sees_a_gap() -> None:
    bench = Bench()
    for _ in range(CACHE_BACKLOG):
        bench.outbox.send(1, pb.WorkerMessage(load=pb.Load()))
    bench.fill([1])
    bench.feed.publish(busy=False)
    assert len(await bench.told()) == CACHE_BACKLOG
    bench.fill([2])
    bench.feed.publish(busy=False)
    (events,) = await bench.told()
    assert events.number == 2


async def test_what_left_the_pool_for_the_second_tier_is_kept_until_it_is_gone() -> None:
    tiered = TieredPool(pages=8, rows=4)
    bench = Bench()
    bench.feed = CacheFeed(tiered.pool, bench.outbox)
    router, late = CacheIndex(), CacheIndex()

    async def tell() -> None:
        bench.feed.publish(busy=False)
        bench.feed.send_all(1)
        for event in await bench.told():
            (late if event.reset else router).apply(event)

    def states(held: CacheIndex) -> str:
        """Of the pages a to z: in the pool, kept, or not there."""
        chains = [keys(letter) for letter in "abcdefghijkl"]
        found = (held.leading(chain) + held.leading_in_pool(chain) for chain in chains)
        return "".join("pk-"[2 - count] for count in found)

    for letter in "abcdefghijkl":
        tiered.keep(letter)
        tiered.settle()
        await tell()
        assert states(router) == states(late)
    assert states(router).count("p") == 8
    assert states(router).count("k") > 0
    assert tiered.found("e") == "e"
    await tell()
    assert states(router)[4] == "p"
    tiered.fill_pool()
    tiered.settle()
    await tell()
    assert set(states(router)) == {"k", "-"}
    assert states(router) == states(late)
