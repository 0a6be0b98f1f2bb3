"""How long requests wait, and which are refused at once, in a queue under a virtual clock."""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import Counter
from dataclasses import dataclass, field

import pytest

from baton.core.errors import Exhausted
from baton.router.requests.admission import CAUTION
from baton.router.requests.wait_queue import MANY_PACES, REMEMBERED_SECONDS, Place, WaitQueue

SERVICE_SECONDS = 0.8
SLOTS = 32
CAPACITY = SLOTS / SERVICE_SECONDS
# Share, tenant, priority and deadline.
KINDS = (
    (0.35, "shop", 0, 3.2),
    (0.15, "shop", 0, 6.4),
    (0.30, "search", 0, 4.8),
    (0.20, "reports", 10, 9.6),
)


def place(order: int, tenant: str = "", priority: int = 0) -> Place:
    return Place(priority, order, tenant)


def queued(*places: Place, limit: int = 10_000) -> WaitQueue:
    queue = WaitQueue(limit)
    for each in places:
        queue.join(each, 0.0)
    return queue


def admission_order(queue: WaitQueue) -> list[Place]:
    """The order in which the queue's requests are admitted."""
    admitted = []
    while head := queue.head:
        queue.admitted(head, 0.0)
        queue.leave(head)
        admitted.append(head)
    return admitted


def test_the_first_to_arrive_is_the_head() -> None:
    assert [each.order for each in admission_order(queued(place(2), place(1)))] == [1, 2]


def test_the_lowest_priority_is_the_head() -> None:
    queue = queued(place(1, priority=1000), place(2), place(3, priority=-1), place(4))
    assert [each.order for each in admission_order(queue)] == [3, 2, 4, 1]


def test_tenants_take_turns() -> None:
    queue = queued(*(place(order, "busy") for order in range(1000)), place(1000, "single"))
    assert [each.tenant for each in admission_order(queue)[:3]] == ["busy", "single", "busy"]


def test_a_turn_is_kept_when_a_request_leaves() -> None:
    queue = queued(place(1, "a"), place(2, "b"), place(3, "b"), place(4, "a"))
    queue.leave(place(1, "a"))
    assert [each.order for each in admission_order(queue)] == [4, 2, 3]


def test_a_retry_keeps_its_requests_place() -> None:
    queue = queued(place(5), place(6))
    queue.join(place(2), 0.0, retry=True)
    assert queue.head == place(2)


def test_a_full_queue_refuses_and_says_when_to_retry() -> None:
    queue = queued(place(1), place(2), limit=2)
    with pytest.raises(Exhausted) as refused:
        queue.join(place(3), 0.0)
    assert refused.value.retry_after == 1.0


def test_a_full_queue_admits_a_retry() -> None:
    queue = queued(place(4), limit=1)
    queue.join(place(3), 0.0, retry=True)
    assert queue.priorities == {0: 2}


def test_a_full_queue_refuses_the_last_of_a_later_priority_instead() -> None:
    queue = queued(place(1, priority=5), place(2, priority=5), limit=2)
    assert queue.join(place(3), 0.0) == [place(2, priority=5)]
    assert [each.order for each in admission_order(queue)] == [3, 1]


def test_a_full_queue_refuses_the_tenant_with_most_requests_instead() -> None:
    queue = queued(place(1, "busy"), place(2, "busy"), place(3, "busy"), limit=3)
    assert queue.join(place(4, "single"), 0.0) == [place(3, "busy")]
    with pytest.raises(Exhausted):
        queue.join(place(5, "single"), 0.0)


def test_requests_give_way_only_if_enough_of_them_do() -> None:
    queue = queued(*(place(order, priority=order // 2) for order in range(6)))
    assert queue.displace(place(9, priority=1), 3) == []
    assert queue.priorities == {0: 2, 1: 2, 2: 2}
    assert [each.order for each in queue.displace(place(9), 3)] == [5, 4, 3]
    assert queue.priorities == {0: 2, 1: 1}
    queue = queued(*(place(order, "busy") for order in range(6)))
    assert queue.displace(place(9, "single"), 4) == []
    assert [each.order for each in queue.displace(place(9, "single"), 3)] == [5, 4, 3]


def test_a_full_queue_refuses_no_retry_and_no_earlier_priority() -> None:
    queue = queued(place(1), limit=1)
    with pytest.raises(Exhausted):
        queue.join(place(2, "other", priority=1), 0.0)
    queue = queued(limit=1)
    queue.join(place(1, priority=1), 0.0, retry=True)
    with pytest.raises(Exhausted):
        queue.join(place(2), 0.0)


def test_waiting_requests_are_counted_by_priority() -> None:
    queue = queued(place(1, "a", 5), place(2), place(3, "b", 5))
    assert list(queue.priorities.items()) == [(0, 1), (5, 2)]


def paced(interval: float, waiting: int) -> tuple[WaitQueue, float]:
    """A queue from which a request was admitted at each interval, and the time of the last."""
    places = [place(order) for order in range(waiting + 100)]
    queue = queued(*places)
    queue.wait(places[0], 0.0)
    for number, each in enumerate(places[:100]):
        now = interval * (number + 1)
        queue.admitted(each, now)
        queue.leave(each)
    return queue, now


def test_the_wait_is_estimated_from_the_rate_of_admissions() -> None:
    queue, now = paced(2.0, waiting=10)
    assert queue.retry_after == pytest.approx(20.0, rel=0.01)
    assert queue.expected_wait(place(1000), now) == pytest.approx(20.0, rel=0.01)


def test_admissions_many_at_a_time_are_waited_for() -> None:
    places = [place(order) for order in range(1000)]
    queue = queued(*places)
    queue.wait(places[0], 0.0)
    for number, each in enumerate(places[:320]):
        queue.admitted(each, now := float(number // 32))
        queue.leave(each)
    # In front of the next 32, and up to a second before them.
    assert queue.expected_wait(place(1000, "single"), now) == pytest.approx(0.5)


def test_an_estimate_has_bounds() -> None:
    queue, _ = paced(100.0, waiting=1)
    assert queue.retry_after == 60.0


def test_a_tenant_waits_for_its_own_turns() -> None:
    queue, now = paced(1.0, waiting=10)
    assert queue.expected_wait(place(1000, "single"), now) == pytest.approx(1.0, rel=0.01)


def test_a_later_priority_waits_for_all_earlier_requests() -> None:
    queue, now = paced(1.0, waiting=10)
    assert queue.expected_wait(place(1000, "batch", 5), now) == pytest.approx(10.0, rel=0.01)
    assert queue.expected_wait(place(1000, "live", -5), now) == 0.0


def test_a_tenant_that_is_never_admitted_waits_on() -> None:
    queue, now = paced(0.1, waiting=60)
    starved, next_one = place(1000, "batch", 5), place(1001, "batch", 5)
    queue.join(starved, 0.0)
    queue.wait(starved, now)
    for order in range(100, 150):
        now += 0.1
        queue.admitted(place(order), now)
        queue.leave(place(order))
    assert queue.expected_wait(next_one, now) == pytest.approx(5.0)
    queue.leave(starved)
    # The next one tries again.
    assert queue.expected_wait(next_one, now) < 2.0


def test_a_later_priority_gets_what_earlier_ones_leave() -> None:
    queue, now = paced(1.0, waiting=1)
    later = place(1000, "batch", 5)
    alone = queue.expected_wait(later, now)
    for order in range(2000, 2005):
        now += 2.0
        queue.join(place(order), now)
        queue.admitted(place(order), now)
        queue.leave(place(order))
    # Half of the admissions are taken.
    assert queue.expected_wait(later, now) > 1.5 * alone
    for order in range(3000, 3005):
        queue.join(place(order), now)
    assert queue.expected_wait(later, now) > 100.0


def test_the_first_to_wait_know_how_often_running_requests_end() -> None:
    queue = WaitQueue(10_000)
    for _ in range(4):
        queue.service.begin()
    assert queue.service.rate == 0.0
    for _ in range(2):
        queue.service.end(2.0)
        queue.service.begin()
    for order in range(10):
        queue.join(place(order), 0.0)
        queue.wait(place(order), 0.0)
    # Four run for two seconds each.
    assert queue.expected_wait(place(10), 0.0) == pytest.approx(5.0)
    assert queue.retry_after == pytest.approx(5.0)


def test_a_tenant_waits_for_turns_of_those_that_join_later() -> None:
    queue, now = paced(1.0, waiting=10)
    queue.join(place(1000, "single"), now)
    assert queue.expected_wait(place(1001), now) == pytest.approx(11.0, rel=0.01)
    for order in range(2000, 2010):
        queue.join(place(order, "single"), now)
        queue.leave(place(order, "single"))
    # As many turns as it has, and no more.
    assert queue.expected_wait(place(1001), now) == pytest.approx(21.0, rel=0.01)


def test_idle_time_is_no_interval_between_admissions() -> None:
    queue = queued()
    for order in range(10):
        first, second = place(2 * order), place(2 * order + 1)
        queue.join(first, 0.0)
        queue.wait(first, 1000.0 * order)
        queue.join(second, 0.0)
        queue.wait(second, 1000.0 * order)
        for each, now in ((first, 1000.0 * order + 1.0), (second, 1000.0 * order + 2.0)):
            queue.admitted(each, now)
            queue.leave(each)
    queue.join(place(100), 0.0)
    assert queue.expected_wait(place(101), 9002.0) == pytest.approx(1.0)
    queue.wait(place(100), 9002.0 + 2 * REMEMBERED_SECONDS)
    assert queue.expected_wait(place(101), 9002.0 + 2 * REMEMBERED_SECONDS) == 0.0


def test_what_is_remembered_of_tenants_is_bounded() -> None:
    queue = queued()
    for order in range(3 * MANY_PACES):
        each = place(order, f"tenant-{order}")
        queue.join(each, 0.0)
        queue.wait(each, float(order))
        queue.leave(each)
    assert len(queue._tenants) <= MANY_PACES + 1


@dataclass
class SimulatedCluster:
    """Workers with so many slots. A request is refused when it arrives if it is predicted to miss
    its deadline or the objective, and at the head of the queue if it would miss its deadline."""

    objective: float = math.inf
    queue: WaitQueue = field(default_factory=lambda: WaitQueue(10_000))
    outcomes: Counter[str] = field(default_factory=Counter)
    free: int = SLOTS
    ends: list[float] = field(default_factory=list)
    arrivals: dict[Place, tuple[float, float]] = field(default_factory=dict)  # with deadlines
    waits: list[float] = field(default_factory=list)  # of those that were admitted

    def arrive(self, place: Place, now: float, deadline: float) -> None:
        self.advance(now)
        wait = (1.0 + CAUTION) * self.queue.expected_wait(place, now)
        if wait > self.objective or now + wait + SERVICE_SECONDS > deadline:
            self.outcomes["refused at once"] += 1
            return
        self.queue.join(place, now)
        self.arrivals[place] = now, deadline
        self.admit(now)
        if place in self.arrivals:
            self.queue.wait(place, now)

    def advance(self, now: float) -> None:
        while self.ends and self.ends[0] <= now:
            at = heapq.heappop(self.ends)
            self.queue.service.end(SERVICE_SECONDS)
            self.free += 1
            self.admit(at)
        for place in [place for place, (_, end) in self.arrivals.items() if end <= now]:
            self.leave(place, "late")

    def admit(self, now: float) -> None:
        while self.free and (place := self.queue.head):
            arrived, deadline = self.arrivals[place]
            if now + SERVICE_SECONDS > deadline:
                self.leave(place, "refused later")
                continue
            self.queue.admitted(place, now)
            self.queue.service.begin()
            self.waits.append(now - arrived)
            self.leave(place, "in time")
            self.free -= 1
            heapq.heappush(self.ends, now + SERVICE_SECONDS)

    def leave(self, place: Place, outcome: str) -> None:
        self.queue.leave(place)
        del self.arrivals[place]
        self.outcomes[outcome] += 1


def offered(load: float, objective: float = math.inf, seconds: float = 60.0) -> SimulatedCluster:
    """Has met requests at `load` times its capacity, after 5 seconds at half of the capacity."""
    cluster, draw, now, order = SimulatedCluster(objective), random.Random(1), 0.0, 0
    weights = [share for share, *_ in KINDS]
    for rate, end in ((0.5 * CAPACITY, 5.0), (load * CAPACITY, 5.0 + seconds)):
        while (now := now + draw.expovariate(rate)) < end:
            ((_, tenant, priority, deadline),) = draw.choices(KINDS, weights)
            cluster.arrive(Place(priority, order, tenant), now, now + deadline)
            order += 1
    cluster.advance(now + 20.0)
    return cluster


@pytest.mark.parametrize("load", [1.5, 2.0, 4.0])
def test_overload_is_refused_at_once_and_the_rest_is_in_time(load: float) -> None:
    outcomes = offered(load).outcomes
    answered = outcomes["in time"]
    assert answered >= 0.95 * CAPACITY * 60.0
    later = outcomes["late"] + outcomes["refused later"]
    assert later <= 0.01 * outcomes.total()


@pytest.mark.parametrize("load", [1.5, 2.0, 4.0])
def test_what_is_admitted_keeps_the_objective(load: float) -> None:
    cluster = offered(load, objective=1.0)
    outcomes = cluster.outcomes
    assert outcomes["in time"] >= 0.95 * CAPACITY * 60.0
    assert outcomes["late"] + outcomes["refused later"] <= 0.003 * outcomes.total()
    assert statistics.quantiles(cluster.waits, n=100)[98] <= 1.0


def test_half_the_capacity_is_answered_in_full() -> None:
    outcomes = offered(0.5, objective=1.0).outcomes
    assert outcomes["in time"] == outcomes.total()
