from __future__ import annotations

from baton.router.placement.worker_state import PromptQueue


def test_what_was_sent_counts_until_it_has_been_read() -> None:
    queue = PromptQueue()
    assert not queue
    first, second = queue.add(500, 0), queue.add(200, 192)
    assert queue.queued_tokens == 508
    queue.remove(first)
    assert queue.queued_tokens == 8
    queue.remove(second)
    assert queue.queued_tokens == 0


def test_a_report_knows_how_far_a_prompt_is() -> None:
    queue = PromptQueue()
    queue.add(500, 0)
    queue.report(0)  # made before the prompt was taken
    assert queue.queued_tokens == 500
    queue.report(300)
    assert queue.queued_tokens == 300
    queue.add(100, 0)
    assert queue.queued_tokens == 400


def test_a_report_counts_cached_tokens_and_we_do_not() -> None:
    queue = PromptQueue()
    queue.add(500, 480)
    for _ in range(2):
        queue.report(500)
    assert queue.queued_tokens == 20


def test_a_report_knows_of_other_routers() -> None:
    queue = PromptQueue()
    queue.report(900)
    assert queue.queued_tokens == 900
    queue.add(100, 0)
    assert queue.queued_tokens == 900
    for _ in range(2):
        queue.report(1000)
    assert queue.queued_tokens == 1000


def test_a_queue_tells_for_how_long_there_was_a_prompt() -> None:
    now = 5.0
    queue = PromptQueue(lambda: now)
    now = 6.0
    prompt = queue.add(100, 0)
    now = 8.0
    assert queue.busy_seconds == 2.0
    queue.remove(prompt)
    now = 9.0
    assert queue.busy_seconds == 2.0
    queue.report(50)  # of other routers
    now = 9.5
    assert queue.busy_seconds == 2.5


def test_a_prompt_that_came_and_went_between_two_reports_was_there() -> None:
    queue = PromptQueue()
    queue.report(0)
    assert queue.was_empty
    queue.remove(queue.add(100, 0))
    queue.report(0)
    assert not queue.was_empty
    queue.report(0)
    assert queue.was_empty
