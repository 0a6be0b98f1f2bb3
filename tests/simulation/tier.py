"""A second tier whose copies take their time, for simulated pools."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from baton.engine.page_files import Task
from baton.engine.page_memory import Move, PageBytes
from baton.engine.page_pool import PagePool
from baton.engine.second_tier import SecondTier
from baton.engine.tier_copies import RestoreCosts, Tier

from .world import World

ROWS = 12


class SimulatedPageMemory:
    """Pages and rows are lists of cells."""

    def __init__(self, pages: list[list[int]]) -> None:
        self._pages = pages
        self._rows: list[list[int]] = [[] for _ in range(ROWS)]
        self.staging = ROWS

    def row(self, row: int) -> PageBytes:
        raise NotImplementedError("there are no files")

    def copy(self, moves: Sequence[Move], *, restore: bool = False) -> None:
        for page, row in moves:
            if restore:
                self._pages[page][:] = self._rows[row]
            else:
                self._rows[row] = list(self._pages[page])


class SimulatedBackground:
    """Runs one task after the other, each a little later."""

    def __init__(self, world: World, is_postponed: Callable[[Task], bool]) -> None:
        self._world = world
        self._is_postponed = is_postponed
        self._tasks: deque[Task] = deque()

    def submit(self, task: Task) -> None:
        self._tasks.append(task)
        self._world.after(self._world.random.random() * 0.01, self._run)

    def stop(self, seconds: float) -> None:
        self._tasks.clear()

    def _run(self) -> None:
        if not self._is_postponed(self._run):
            self._tasks.popleft()()


class AlwaysPays(RestoreCosts):
    """Nothing that is measured on a real clock decides anything here."""

    def pays(self, tiers: list[Tier], queued: list[Tier], places: int) -> bool:
        return True


def add_second_tier(
    pool: PagePool,
    memory: list[list[int]],
    world: World,
    is_postponed: Callable[[Task], bool],
    wake: Callable[[], None],
) -> None:
    tier = SecondTier(
        pool,
        SimulatedPageMemory(memory),
        wake,
        lambda name, on_crash: SimulatedBackground(world, is_postponed),
    )
    tier.ready_pages = pool.total  # so that much is restored
    tier.costs = AlwaysPays(pool.page_size)
