from __future__ import annotations

import asyncio

import pytest

from baton.core.errors import Exhausted
from baton.router.requests.answering import gather_all


class Work:
    """Ends as it is told to, and says when it has ended."""

    def __init__(self) -> None:
        self.ended = False
        self.result: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        try:
            return await self.result
        finally:
            self.ended = True


async def test_results_come_in_the_order_of_the_works() -> None:
    one, other = Work(), Work()
    both = asyncio.create_task(gather_all([one.run(), other.run()]))
    other.result.set_result(2)
    await asyncio.sleep(0)
    one.result.set_result(1)
    assert await both == [1, 2]
    one.result = asyncio.get_running_loop().create_future()
    one.result.set_result(3)
    assert await gather_all([one.run()]) == [3]


async def test_an_error_of_one_work_ends_them_all() -> None:
    one, other = Work(), Work()
    one.result.set_exception(Exhausted("full"))
    with pytest.raises(Exhausted):
        await gather_all([one.run(), other.run()])
    assert one.ended
    assert other.ended


@pytest.mark.parametrize("count", [1, 2])
async def test_cancelling_ends_every_work(count: int) -> None:
    works = [Work() for _ in range(count)]
    all_of_them = asyncio.create_task(gather_all([work.run() for work in works]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    all_of_them.cancel()
    with pytest.raises(asyncio.CancelledError):
        await all_of_them
    assert all(work.ended for work in works)
