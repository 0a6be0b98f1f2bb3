from __future__ import annotations

import random

import pytest

from baton.core.types import AttemptKey, Sampling, Work
from baton.decode_worker.decode_scheduler import DecodeScheduler
from baton.engine.page_pool import PagePool
from baton.engine.sequence import Sequence
from baton.engine.step import Plan

PRIORITIES = {"batch": 1000, "flex": 999}


def work(name: str, prompt: int, answer: int = 8, salt: str = "") -> Work:
    """Names that begin with "batch" are background requests."""
    key, priority = AttemptKey(name, 1), PRIORITIES.get(name.partition("-")[0], 0)
    return Work(
        key, range(prompt), Sampling(), answer, frozenset(), cache_salt=salt, priority=priority
    )


class Bench:
    """A scheduler with a pool of 4-token pages, driven the way the role drives it."""

    def __init__(
        self,
        pages: int = 100,
        max_batch: int = 8,
        chunk: int = 16,
        root: bytes | None = None,
        background_batch: int = 0,
    ) -> None:
        self.pool = PagePool(pages, 4, root)
        self.scheduler = DecodeScheduler(
            self.pool, max_batch, chunk, background_batch=background_batch
        )
        self.reserved: dict[str, Sequence] = {}
        self.sequences: dict[str, Sequence] = {}

    def arrive(self, name: str, prompt: int, answer: int = 8, salt: str = "") -> None:
        self.reserve(name, prompt, answer, salt)
        self.scheduler.grant()
        self.land(name)

    def reserve(self, name: str, prompt: int, answer: int = 8, salt: str = "") -> Sequence:
        sequence = Sequence.queued(work(name, prompt, answer, salt), self.pool)
        self.scheduler.reserve(sequence)
        self.reserved[name] = sequence
        return sequence

    def compute(self, name: str, prompt: int, answer: int = 8) -> Sequence:
        sequence = Sequence.queued(work(name, prompt, answer), self.pool)
        self.scheduler.compute(sequence)
        self.sequences[name] = sequence
        return sequence

    def land(self, name: str) -> None:
        assert self.scheduler.arrive(AttemptKey(name, 1), first_token=0)
        self.sequences[name] = self.reserved.pop(name)

    def step(self) -> list[tuple[str, int]]:
        plan: Plan = self.scheduler.next()
        for sequence, count in plan.items():
            samples = sequence.samples(count)
            assert self.pool.pages_for(sequence.computed + count) <= len(sequence.lease)
            sequence.computed += count
            sequence.settle(sequence.computed)
            if samples and sequence.append(0):
                self.scheduler.remove(sequence)
                del self.sequences[sequence.work.key.request_id]
        return [(sequence.work.key.request_id, count) for sequence, count in plan.items()]

    def step_until_preempted(self, name: str) -> Sequence:
        sequence = self.sequences[name]
        while sequence.computed:
            self.step()
        return sequence


def test_an_arrived_request_decodes_one_token_a_step() -> None:
    bench = Bench()
    bench.arrive("a", prompt=6, answer=3)
    assert [bench.step(), bench.step(), bench.step()] == [[("a", 1)], [("a", 1)], []]
    assert bench.pool.free == 100


def test_requests_join_and_leave_at_every_step() -> None:
    bench = Bench()
    bench.arrive("a", 6, answer=3)
    assert bench.step() == [("a", 1)]
    bench.arrive("b", 6, answer=3)
    assert bench.step() == [("a", 1), ("b", 1)]
    assert bench.step() == [("b", 1)]


def test_a_full_batch_makes_the_next_request_wait() -> None:
    bench = Bench(max_batch=1)
    bench.arrive("a", 6, answer=2)
    bench.arrive("b", 6, answer=2)
    assert [bench.step(), bench.step()] == [[("a", 1)], [("b", 1)]]


def test_a_reservation_takes_only_the_pages_of_its_prompt() -> None:
    bench = Bench()
    bench.reserve("a", 9, answer=80)
    assert [len(reservation.lease) for reservation in bench.scheduler.grant()] == [3]


def test_reservations_are_granted_in_order_as_pages_come_free() -> None:
    bench = Bench(pages=6)
    for name in ("a", "b", "c"):
        bench.reserve(name, 12)
    assert [item.work.key.request_id for item in bench.scheduler.grant()] == ["a"]
    reservation = bench.reserved["a"]
    assert not bench.scheduler.remove(reservation)
    reservation.lease.release()
    assert [item.work.key.request_id for item in bench.scheduler.grant()] == ["b"]


def test_an_unknown_arrival_is_dropped() -> None:
    assert not Bench().scheduler.arrive(AttemptKey("late", 1), 0)


def test_a_withdrawn_reservation_cannot_arrive() -> None:
    bench = Bench()
    bench.reserve("a", 6)
    bench.scheduler.grant()
    assert not bench.scheduler.remove(bench.reserved["a"])
    assert not bench.scheduler.arrive(AttemptKey("a", 1), 0)


def test_when_the_pool_is_full_the_youngest_gives_way_and_is_computed_again() -> None:
    bench = Bench(pages=6)
    bench.arrive("old", 8, answer=12)
    bench.arrive("young", 8, answer=9)
    assert bench.pool.free == 2
    young = bench.step_until_preempted("young")
    assert bench.sequences["old"].computed
    tokens = len(young.tokens)
    steps = [bench.step() for _ in range(16)]
    assert [("young", tokens)] in steps
    assert not bench.sequences
    assert bench.pool.free == 6


def test_a_request_of_a_later_priority_gives_way_though_it_is_older() -> None:
    bench = Bench(pages=6)
    bench.arrive("batch", 8, answer=12)
    bench.arrive("live", 8, answer=14)
    bench.step_until_preempted("batch")
    assert bench.sequences["live"].computed
    bench.reserve("batch-2", 1)
    assert bench.scheduler.grant() == []
    bench.reserve("live-2", 1)
    bench.scheduler.remove(bench.sequences.pop("live"))
    assert [each.work.key.request_id for each in bench.scheduler.grant()] == ["live-2"]


def test_local_prompts_are_computed_by_priority() -> None:
    bench = Bench(chunk=8)
    bench.compute("flex", 20)
    assert bench.step() == [("flex", 8)]
    bench.compute("live", 10)
    assert bench.step() == [("live", 8)]
    assert bench.step() == [("live", 2), ("flex", 6)]


def test_background_requests_have_smaller_steps_of_their_own() -> None:
    bench = Bench(chunk=32, background_batch=2)
    for index in range(3):
        bench.compute(f"batch-{index}", 10, answer=20)
    assert bench.step() == [("batch-0", 8)]
    bench.compute("live", 18, answer=2)
    assert bench.step() == [("live", 18)]
    assert bench.step() == [("live", 1)]
    assert bench.step() == [("batch-0", 2), ("batch-1", 6)]
    assert bench.step() == [("batch-0", 1), ("batch-1", 4)]
    assert bench.step() == [("batch-0", 1), ("batch-1", 1)]
    assert bench.scheduler.waiting == 1


def test_background_requests_pause_while_another_runs() -> None:
    bench = Bench()
    for name in ("batch", "batch-2"):
        bench.arrive(name, 6, answer=20)
    assert bench.step() == [("batch", 1), ("batch-2", 1)]
    bench.arrive("live", 6, answer=4)
    free = bench.pool.free
    assert [bench.step() for _ in range(3)] == [[("live", 1)]] * 3
    assert bench.pool.free == free + 2, "they keep their pages"
    assert bench.step() == [("batch", 1), ("batch-2", 1)]


def test_paused_requests_are_neither_running_nor_waiting() -> None:
    bench = Bench()
    bench.arrive("batch", 6)
    bench.step()
    counts = bench.scheduler
    assert (counts.running, counts.background, counts.waiting, counts.paused) == (1, 1, 0, 0)
    bench.arrive("live", 6)
    bench.step()
    assert (counts.running, counts.background, counts.waiting, counts.paused) == (1, 0, 0, 1)


def test_a_paused_request_takes_no_place_in_the_batch() -> None:
    bench = Bench(max_batch=2)
    for name in ("batch", "batch-2"):
        bench.arrive(name, 6)
    bench.step()
    for name in ("live", "live-2"):
        bench.arrive(name, 6)
    assert bench.step() == [("live", 1), ("live-2", 1)]


def test_requests_of_other_priorities_share_steps() -> None:
    bench = Bench()
    bench.arrive("live", 6)
    bench.arrive("flex", 6)
    assert bench.step() == [("live", 1), ("flex", 1)]


def test_background_requests_pause_while_they_are_held() -> None:
    bench = Bench()
    bench.arrive("batch", 6)
    bench.scheduler.held = True
    assert (bench.step(), bench.scheduler.paused) == ([], 1)
    bench.arrive("live", 6, answer=2)
    assert [bench.step(), bench.step()] == [[("live", 1)], []]
    bench.scheduler.held = False
    assert bench.step() == [("batch", 1)]


def test_a_prompt_on_its_way_pauses_nobody() -> None:
    bench = Bench()
    bench.arrive("batch", 6)
    bench.reserve("live", 6)
    bench.scheduler.grant()
    assert bench.step() == [("batch", 1)]


def test_a_reservation_takes_the_pages_of_background_requests() -> None:
    bench = Bench(pages=8)
    for name in ("batch", "batch-2"):
        bench.arrive(name, 8)
    bench.step()
    bench.reserve("batch-3", 12)
    assert bench.scheduler.grant() == []
    bench.reserve("live", 12)
    assert [each.work.key.request_id for each in bench.scheduler.grant()] == ["live"]
    bench.land("live")
    assert bench.sequences["batch-2"].lease.released
    assert not bench.sequences["batch"].lease.released
    bench.scheduler.remove(bench.reserved.pop("batch-3"))
    while bench.sequences:
        bench.step()
    assert bench.pool.free == 8


def test_a_local_prompt_takes_the_pages_of_background_requests() -> None:
    bench = Bench(pages=6, chunk=64)
    bench.compute("batch", 16)
    assert bench.step() == [("batch", 16)]
    bench.compute("live", 16)
    assert bench.step() == [("live", 16)]
    assert bench.sequences["batch"].lease.released


def test_a_local_prompt_does_not_wait_for_a_page_of_a_paused_one() -> None:
    bench = Bench(chunk=32, root=b"root")
    bench.compute("batch", 24)
    assert bench.step() == [("batch", 8)]
    bench.compute("live", 24)
    assert bench.step() == [("live", 16)], "two pages are cached"


def test_reservations_are_granted_by_priority() -> None:
    bench = Bench()
    for name in ("batch", "live", "live-2"):
        bench.reserve(name, 4)
    granted = [each.work.key.request_id for each in bench.scheduler.grant()]
    assert granted == ["live", "live-2", "batch"]


def test_recomputing_is_cut_into_chunks_beside_decoding_requests() -> None:
    bench = Bench(pages=12, chunk=8)
    bench.arrive("old", 16, answer=30)
    bench.arrive("young", 18, answer=30)
    young = bench.step_until_preempted("young")
    bench.scheduler.remove(bench.sequences.pop("old"))
    total = len(young.tokens)
    assert [bench.step() for _ in range(3)] == [[("young", 8)]] * 3
    assert bench.step() == [("young", total - 24)]


def test_new_reservations_wait_while_a_preempted_request_does() -> None:
    bench = Bench(pages=6)
    bench.arrive("old", 8, answer=14)
    bench.arrive("young", 8, answer=14)
    bench.step_until_preempted("young")
    bench.reserve("new", 1)
    assert bench.scheduler.grant() == []


def test_a_preempted_request_can_be_released() -> None:
    bench = Bench(pages=6)
    bench.arrive("old", 8, answer=14)
    bench.arrive("young", 8, answer=14)
    bench.step_until_preempted("young")
    bench.scheduler.remove(bench.sequences.pop("young"))
    while bench.sequences:
        bench.step()
    assert bench.pool.free == 6


def test_a_prompt_that_nobody_sends_is_computed_here_in_chunks() -> None:
    bench = Bench(chunk=4)
    bench.compute("a", prompt=10, answer=3)
    steps = [bench.step() for _ in range(6)]
    assert steps == [[("a", 4)], [("a", 4)], [("a", 2)], [("a", 1)], [("a", 1)], []]
    assert bench.pool.free == 100


def test_a_prompt_to_compute_waits_for_its_pages() -> None:
    bench = Bench(pages=6)
    bench.arrive("a", 16, answer=3)
    bench.compute("b", prompt=16, answer=2)
    assert [bench.step(), bench.step()] == [[("a", 1)], [("a", 1)]]
    assert bench.step() == [("b", 16)]


def test_a_prompt_to_compute_can_be_released_before_it_starts() -> None:
    bench = Bench()
    bench.scheduler.remove(bench.compute("a", 10))
    assert (bench.step(), bench.pool.free, bench.scheduler.waiting) == ([], 100, 0)


@pytest.mark.parametrize("seed", range(20))
def test_any_load_ends_with_an_empty_pool(seed: int) -> None:
    """Random requests, releases and arrivals on a pool that holds barely one of them."""
    draw = random.Random(seed)
    bench = Bench(pages=draw.randint(8, 12), max_batch=draw.randint(1, 4), chunk=8)
    names = [f"{draw.choice(['live', 'batch'])}-{index}" for index in range(30)]
    travelling: list[str] = []
    for _ in range(3000):
        if names and draw.random() < 0.3:
            name = names.pop()
            bench.reserve(name, draw.randint(1, 16), draw.randint(1, 16))
        travelling += [item.work.key.request_id for item in bench.scheduler.grant()]
        if travelling and draw.random() < 0.5:
            bench.land(travelling.pop(draw.randrange(len(travelling))))
        if bench.sequences and draw.random() < 0.02:
            name = draw.choice(list(bench.sequences))
            bench.scheduler.remove(bench.sequences.pop(name))
        bench.scheduler.held = draw.random() < 0.1
        kinds = {name.partition("-")[0] for name, _ in bench.step()}
        assert len(kinds) < 2, "background requests share no step with others"
        assert bench.pool.check_integrity() == ""
    assert not names
    assert not bench.sequences
    assert (bench.scheduler.waiting, bench.scheduler.running, bench.pool.leased) == (0, 0, 0)


class InFlight:
    """A step that a GPU runs beside the host."""

    def __init__(self, plan: Plan) -> None:
        self._sampled = [each for each, count in plan.items() if each.samples(count)]
        self._leases = [sequence.lease for sequence in plan]
        for sequence, count in plan.items():
            sequence.lease.pin()
            sequence.launched(count)

    def land(self) -> None:
        for lease in self._leases:
            lease.unpin()
        for sequence in self._sampled:
            sequence.expected -= 1
            sequence.append(0)


def test_a_step_is_planned_on_tokens_that_only_the_device_knows() -> None:
    bench = Bench()
    bench.arrive("a", prompt=6, answer=4)
    first = InFlight(bench.scheduler.next())
    second = InFlight(bench.scheduler.next())
    assert bench.sequences["a"].computed == 8
    first.land()
    second.land()
    assert bench.sequences["a"].generated == 3


def test_nothing_is_planned_beyond_the_last_token_that_is_under_way() -> None:
    bench = Bench()
    bench.arrive("a", prompt=6, answer=2)
    assert bench.scheduler.next()
    InFlight(bench.scheduler.next())
    assert bench.scheduler.next() == {}


def test_a_request_is_paused_though_a_step_of_it_is_under_way() -> None:
    bench = Bench(pages=6)
    bench.arrive("batch", prompt=8, answer=20)
    flight = InFlight(bench.scheduler.next())
    bench.compute("live", prompt=16, answer=2)
    assert bench.scheduler.next() == {}, "its pages are in use"
    flight.land()
    assert list(bench.scheduler.next()) == [bench.sequences["live"]]
    assert bench.sequences["batch"].generated == 2


def test_preemption_waits_for_the_step_under_way() -> None:
    bench = Bench(pages=4)
    bench.arrive("a", prompt=4)
    bench.arrive("b", prompt=4)
    flight = None
    while plan := bench.scheduler.next():
        if flight is not None:
            flight.land()
        flight = InFlight(plan)
    assert flight is not None
    assert all(not each.lease.released for each in bench.sequences.values())
    flight.land()
    assert list(bench.scheduler.next()) == [bench.sequences["a"]]
    assert bench.sequences["b"].lease.released


def test_a_preempted_request_finds_its_own_pages_again() -> None:
    bench = Bench(pages=7, root=b"root")
    bench.arrive("old", prompt=8, answer=9)
    bench.arrive("young", prompt=8, answer=9, salt="its own")
    sequence = bench.step_until_preempted("young")
    assert len(sequence.tokens) == 13
    while not sequence.computed:
        bench.step()
    assert sequence.lease.found == 3, "only the page that was not full was taken for another"


def test_of_a_prompt_that_is_partly_there_only_the_rest_is_awaited() -> None:
    bench = Bench(root=b"root")
    bench.arrive("first", prompt=10)
    bench.reserve("second", 14)
    (granted,) = bench.scheduler.grant()
    assert (granted.lease.found, len(granted.lease.fresh)) == (2, 2)
    assert granted.lease.pages[:2] == bench.sequences["first"].lease.pages[:2]


def test_requests_that_go_on_alike_are_computed_one_after_the_other() -> None:
    bench = Bench(root=b"root")
    for name in ("one", "two"):
        bench.compute(name, 24)
    assert bench.step() == [("one", 16)]
    assert bench.step() == [("one", 8)]
    assert bench.step() == [("one", 1), ("two", 4)]


def test_a_full_pool_is_shared_by_requests_that_begin_alike() -> None:
    bench = Bench(pages=6, root=b"root")
    bench.arrive("first", prompt=12)
    bench.reserve("second", 13)
    assert len(bench.scheduler.grant()) == 1, "four pages, of which three are leased already"
