from __future__ import annotations

import pytest

from baton.core.errors import Exhausted, Internal, PoisonRequest, Unavailable, WorkerLost
from baton.core.types import AttemptKey, Sampling, Work
from baton.router.placement.placement import Placement, Suspicion
from baton.router.requests.attempt import AttemptEnded, RetryState, Tokens

SOMEWHERE = Placement("p0", "d0")
DEATH = AttemptEnded(WorkerLost("worker d0 was lost"), retry=True, death=True)
DRAINED = AttemptEnded(Unavailable("draining"), retry=True)
DEATH_IN_COMPANY = AttemptEnded(
    WorkerLost("worker d0 was lost"), retry=True, death=True, company=True
)
FULL = AttemptEnded(Exhausted("no room"), retry=True)
FINAL = AttemptEnded(Internal("logits"), retry=False)


def retry_state(deaths: int = 2, attempts: int = 5) -> RetryState:
    work = Work(AttemptKey("r", 1), [1, 2, 3], Sampling(seed=9), 10, frozenset({4}))
    return RetryState(work, max_deaths=deaths, max_attempts=attempts)


def test_the_first_attempt_is_the_request_itself() -> None:
    work = retry_state().begin(SOMEWHERE)
    assert (work.key, work.prompt_tokens, work.answer_tokens) == (("r", 1), [1, 2, 3], 0)


def test_looking_at_the_next_attempt_copies_no_prompt() -> None:
    work = Work(AttemptKey("r", 1), [1, 2, 3], Sampling(), 10, frozenset())
    request = RetryState(work, max_deaths=2, max_attempts=5)
    assert request.begin(SOMEWHERE) is request.work is work
    request.emitted(Tokens([7], None))
    request.end(DRAINED)
    retried = request.work
    assert request.begin(SOMEWHERE) is request.work is retried


def test_a_retry_continues_after_the_emitted_tokens() -> None:
    request = retry_state()
    request.begin(SOMEWHERE)
    request.emitted(Tokens([7], None))
    request.emitted(Tokens([8, 9], None))
    assert request.end(DEATH) is None
    work = request.begin(SOMEWHERE)
    assert (work.key, work.prompt_tokens) == (("r", 2), [1, 2, 3, 7, 8, 9])
    assert (work.answer_tokens, work.max_tokens, work.tokens_wanted) == (3, 10, 7)
    assert (work.sampling.seed, work.stop_token_ids) == (9, {4})


def test_placements_give_the_reason_of_each_attempt() -> None:
    request = retry_state()
    request.begin(SOMEWHERE)
    request.end(DEATH)
    request.begin(Placement("p0", "d1"))
    assert [(item.decode, item.explanation) for item in request.placements] == [
        ("d0", "the least predicted time"),
        ("d1", "worker d0 was lost"),
    ]


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        ([DEATH], None),
        ([DEATH, DEATH], PoisonRequest),
        ([DEATH_IN_COMPANY, DEATH_IN_COMPANY], None),
        ([DEATH_IN_COMPANY, DEATH_IN_COMPANY, DRAINED], None),
        ([DEATH_IN_COMPANY, DEATH_IN_COMPANY, DEATH], PoisonRequest),
        ([DEATH_IN_COMPANY, DEATH_IN_COMPANY, DEATH_IN_COMPANY], PoisonRequest),
        ([DRAINED, DRAINED, DRAINED, DRAINED], None),
        ([DRAINED, DRAINED, DRAINED, DRAINED, DRAINED], Unavailable),
        ([DEATH, DRAINED, FULL], None),
        ([DEATH, DRAINED, DEATH], PoisonRequest),
        ([FULL] * 5, Exhausted),
        ([FINAL], Internal),
        ([DEATH, FINAL], Internal),
    ],
)
def test_which_ends_are_final(ends: list[AttemptEnded], error: type[Exception] | None) -> None:
    request = retry_state()
    outcome = None
    for ended in ends:
        assert outcome is None
        request.begin(SOMEWHERE)
        outcome = request.end(ended)
    assert type(outcome) is (error or type(None))


def test_a_refused_request_backs_off_and_a_lost_one_does_not() -> None:
    request = retry_state(attempts=100)
    delays = []
    for ended in (DEATH, FULL, FULL, FULL, *[FULL] * 20):
        request.begin(SOMEWHERE)
        request.end(ended)
        delays.append(request.delay)
    assert delays[0] == 0.0
    assert 0.0 < delays[1] < delays[2] < delays[3] < delays[-1] == 1.0


def test_a_request_that_lost_workers_among_suspects_is_retried_alone() -> None:
    request = retry_state()
    seen = [request.suspicion]
    for _ in range(2):
        request.begin(SOMEWHERE)
        request.end(DEATH_IN_COMPANY)
        seen.append(request.suspicion)
    assert seen == [Suspicion.NONE, Suspicion.SUSPECT, Suspicion.ALONE]
