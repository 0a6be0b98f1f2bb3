from __future__ import annotations

from dataclasses import replace

from baton.core.types import AttemptKey, Pooling, Sampling, Work
from baton.engine.page_groups import make_pool
from baton.engine.page_pool import PagePool
from baton.engine.step import Plan
from baton.prefill_worker.prefill_scheduler import PrefillScheduler, PrefillSequence


def work(name: str, tokens: int) -> Work:
    return Work(AttemptKey(name, 1), range(tokens), Sampling(), 8, frozenset())


class Scheduler(PrefillScheduler):
    def queue(self, work: Work) -> PrefillSequence:
        sequence = PrefillSequence.queued(work, self._pool)
        sequence.push = True
        self.add(sequence)
        return sequence


def scheduler(
    *lengths: int, chunk: int = 10, pages: int = 100, root: bytes | None = None
) -> Scheduler:
    made = Scheduler(PagePool(pages, 4, root), chunk, background_tokens=10)
    for index, length in enumerate(lengths):
        made.queue(work(f"r{index}", length))
    return made


def shape(plan: Plan) -> list[tuple[str, int]]:
    return [(sequence.work.key.request_id, count) for sequence, count in plan.items()]


def run(scheduler: PrefillScheduler) -> list[tuple[str, int]]:
    """One step, as the role does it: compute, and drop what is done."""
    plan = scheduler.next()
    done = [sequence for sequence, count in plan.items() if sequence.samples(count)]
    for sequence, count in plan.items():
        sequence.computed += count
        sequence.settle(sequence.computed)
    for sequence in done:
        scheduler.remove(sequence)
        sequence.lease.release()
    return shape(plan)


def test_an_idle_scheduler_plans_nothing() -> None:
    assert scheduler().next() == {}


def test_short_prompts_share_a_step() -> None:
    assert run(scheduler(3, 4, 2)) == [("r0", 3), ("r1", 4), ("r2", 2)]


def test_a_long_prompt_is_cut_into_chunks() -> None:
    made = scheduler(25)
    assert [run(made), run(made), run(made)] == [[("r0", 10)], [("r0", 10)], [("r0", 5)]]


def test_the_rest_of_a_step_goes_to_the_next_prompt() -> None:
    made = scheduler(12, 15)
    assert [run(made), run(made), run(made)] == [
        [("r0", 10)],
        [("r0", 2), ("r1", 8)],
        [("r1", 7)],
    ]


def test_a_prompt_of_an_earlier_priority_waits_for_one_chunk() -> None:
    made = scheduler()
    made.queue(replace(work("flex", 25), priority=100))
    made.queue(replace(work("flex-2", 2), priority=100))
    assert run(made) == [("flex", 10)]
    made.queue(work("live", 12))
    made.queue(work("live-2", 3))
    assert run(made) == [("live", 10)]
    assert run(made) == [("live", 2), ("live-2", 3), ("flex", 5)]
    assert run(made) == [("flex", 10)]
    assert run(made) == [("flex-2", 2)]


def background(name: str, tokens: int) -> Work:
    return replace(work(name, tokens), priority=1000)


def test_background_prompts_have_short_chunks_and_steps_of_their_own() -> None:
    made = scheduler(chunk=40)
    made.queue(background("batch", 25))
    made.queue(background("batch-2", 2))
    assert run(made) == [("batch", 10)]
    made.queue(work("live", 12))
    assert run(made) == [("live", 12)]
    assert (made.running, made.waiting, made.paused) == (0, 0, 2)
    assert run(made) == [("batch", 10)]
    assert (made.running, made.background, made.waiting, made.paused) == (1, 1, 1, 0)
    assert run(made) == [("batch", 5), ("batch-2", 2)]


def test_held_background_prompts_pause() -> None:
    made = scheduler(chunk=40)
    made.queue(background("batch", 25))
    made.held = True
    assert (run(made), made.paused) == ([], 1)
    made.queue(work("live", 12))
    assert [run(made), run(made)] == [[("live", 12)], []]
    made.held = False
    assert run(made) == [("batch", 10)]


def test_held_background_prompts_are_computed_where_another_waits_for_their_pages() -> None:
    made = scheduler(chunk=40, pages=4)
    made.queue(background("batch", 16))
    assert run(made) == [("batch", 10)]
    made.held = True
    made.queue(work("live", 16))
    assert [run(made), run(made)] == [[("batch", 6)], [("live", 16)]]


def test_a_prompt_does_not_wait_for_pages_of_a_background_prompt() -> None:
    made = scheduler(chunk=40, root=b"root")
    made.queue(background("batch", 25))
    assert run(made) == [("batch", 10)]
    made.queue(work("live", 25))
    made.queue(background("batch-2", 25))
    assert run(made) == [("live", 17)], "two pages are cached"


def test_a_prompt_of_a_later_priority_does_not_overtake_one_without_room() -> None:
    made = scheduler(12, 12, pages=4)
    made.queue(replace(work("batch", 4), priority=1000))
    assert [run(made), run(made), run(made)] == [[("r0", 10)], [("r0", 2)], [("r1", 10)]]


def test_a_prompt_without_room_for_its_pages_waits_and_is_not_overtaken() -> None:
    made = scheduler(12, 12, 4, pages=4)
    assert run(made) == [("r0", 10)]
    assert run(made) == [("r0", 2)]
    assert run(made) == [("r1", 10)]


def test_only_the_piece_that_ends_a_prompt_samples() -> None:
    made = scheduler(12)
    first = made.next()
    assert [sequence.samples(count) for sequence, count in first.items()] == [False]
    next(iter(first)).computed += 10
    assert [sequence.samples(count) for sequence, count in made.next().items()] == [True]


def test_a_removed_prompt_is_not_planned_and_its_pages_are_the_callers() -> None:
    made = scheduler()
    sequence = made.queue(work("r0", 12))
    made.queue(work("r1", 3))
    run(made)
    made.remove(sequence)
    assert len(sequence.lease) == 3
    assert not sequence.lease.released
    assert run(made) == [("r1", 3)]


def test_a_removed_waiting_prompt_held_nothing() -> None:
    made = scheduler()
    sequence = made.queue(work("r0", 5))
    made.remove(sequence)
    assert sequence.lease.released
    assert (made.waiting, made.queued_tokens) == (0, 0)


def test_queued_tokens_count_what_is_not_computed() -> None:
    made = scheduler(25, 7)
    run(made)
    assert made.queued_tokens == 22


def test_nothing_is_planned_for_a_prompt_whose_token_is_on_its_way() -> None:
    made = scheduler(4)
    ((sequence, count),) = made.next().items()
    sequence.launched(count)
    assert made.next() == {}
    sequence.expected -= 1
    assert made.next() == {}, "the token was sampled, and is not appended yet"


def test_what_is_cached_is_not_computed_again() -> None:
    made = scheduler(10, 14, root=b"root")
    assert run(made) == [("r0", 10)]
    assert run(made) == [("r1", 6)]


def test_a_prompt_waits_for_one_that_computes_what_it_begins_with() -> None:
    made = scheduler(12, 14, root=b"root")
    assert run(made) == [("r0", 10)]
    assert run(made) == [("r0", 2), ("r1", 6)], "the page after those is not shared"


def test_others_may_start_while_a_prompt_waits_for_another() -> None:
    made = scheduler(20, 24, root=b"root")
    made.queue(Work(AttemptKey("other", 1), [9, 9, 9], Sampling(), 8, frozenset()))
    assert run(made) == [("r0", 10)]
    assert run(made) == [("r0", 10)]
    made = scheduler(6, 24, root=b"root")
    made.queue(Work(AttemptKey("other", 1), [9, 9, 9], Sampling(), 8, frozenset()))
    assert run(made) == [("r0", 6), ("other", 3)]
    assert run(made) == [("r1", 10)]


def with_windows(*lengths: int, pages: int, windows: tuple[int | None, ...]) -> Scheduler:
    made = Scheduler(make_pool(pages, 4, windows), 40)
    for index, length in enumerate(lengths):
        made.queue(work(f"r{index}", length))
    return made


def test_a_prompt_with_windows_needs_no_room_for_what_they_pass() -> None:
    made = with_windows(400, pages=8, windows=(9,))
    computed = 0
    while planned := run(made):
        computed += sum(count for _, count in planned)
        assert made._pool.check_integrity() == ""
    assert (computed, made._pool.free) == (400, 8)


def test_a_prompt_waits_until_those_before_it_have_the_pages_of_their_windows() -> None:
    made = with_windows(60, 60, pages=8, windows=(9,))
    first = made.next()
    assert shape(first)[0][0] == "r0"
    assert len(first) == 1, "r1 would take what r0 needs to go on"


def test_a_chunk_is_shorter_where_pages_are_few() -> None:
    made = with_windows(60, pages=21, windows=(None, 9))
    ((_, count),) = shape(made.next())
    assert count == 20


def names(sequences: list[PrefillSequence]) -> list[str]:
    return [each.work.key.request_id for each in sequences]


def test_inputs_of_the_embedding_model_are_computed_whole_and_together() -> None:
    made = scheduler(25)
    lengths = {"a": 4, "b": 6, "c": 1, "long": 30, "d": 2}
    for name, length in lengths.items():
        made.queue(replace(work(name, length), pooling=Pooling.ENCODER))
    made.queue(replace(work("alone", 1), pooling=Pooling.ENCODER, alone=True))
    made.queue(replace(work("early", 1), pooling=Pooling.ENCODER, priority=-1))
    made.queue(replace(work("late", 1), pooling=Pooling.ENCODER, priority=1))
    assert (made.waiting, made.queued_tokens) == (9, 25 + 43 + 3)
    batches = []
    while batch := made.next_inputs():
        batches.append(names(batch))
        for sequence in batch:
            made.remove(sequence)
    # A prompt of an earlier priority keeps the last one from being computed.
    assert batches == [["early", "a"], ["b", "c"], ["long"], ["d"], ["alone"]]
    assert [shape(made.next()), made.waiting] == [[("r0", 10)], 1]
