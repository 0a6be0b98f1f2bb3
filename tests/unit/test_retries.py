from __future__ import annotations

import pytest

from baton.core.errors import (
    BatonError,
    Exhausted,
    Internal,
    PoisonRequest,
    QuarantineFull,
    Unavailable,
    WorkerDrained,
    WorkerLost,
)
from baton.core.types import AttemptKey, Sampling, Work
from baton.router.placement.placement import Placement, Suspicion
from baton.router.requests.attempt import AttemptEnded, Tokens
from baton.router.requests.retries import RetryState
from baton.router.requests.verdicts import Finding, Loss, Losses
from baton.v1.worker_pb2 import Verdict

SOMEWHERE = Placement("p0", "d0")
DRAINED = AttemptEnded(WorkerDrained("draining"), retry=True)
REFUSED = AttemptEnded(QuarantineFull("7 of 12 pages"), retry=True)
SILENT = AttemptEnded(Unavailable("silent"), retry=True)
FULL = AttemptEnded(Exhausted("no room"), retry=True)
FINAL = AttemptEnded(Internal("logits"), retry=False)
KILLED = Verdict(ended="killed from outside")
CRASHED = Verdict(ended="SIGSEGV", crashed=True)
BY_US = Verdict(ended="SIGSEGV", crashed=True, suspects=["r"])
AMONG_US = Verdict(ended="SIGSEGV", crashed=True, suspects=["r", "other"])
BY_OTHERS = Verdict(ended="SIGSEGV", crashed=True, suspects=["other", "another"])


def death(verdict: Verdict | None = None) -> AttemptEnded:
    loss = Loss(process=7, verdict=verdict)
    return AttemptEnded(WorkerLost("worker d0 was lost"), retry=True, loss=loss)


DEATH = death()
HANG = AttemptEnded(WorkerLost("it hangs"), retry=True, loss=Loss(process=8, hung=True))


def retry_state(deaths: int = 2, attempts: int = 5) -> RetryState:
    work = Work(AttemptKey("r", 1), [1, 2, 3], Sampling(seed=9), 10, frozenset({4}))
    return RetryState(work, max_deaths=deaths, max_attempts=attempts)


def attempt(request: RetryState, ended: AttemptEnded) -> BatonError | None:
    """One attempt, and what follows where no verdict comes any more."""
    request.begin(SOMEWHERE)
    request.end(ended)
    return request.decide()


def test_the_first_attempt_is_the_request_itself() -> None:
    work = retry_state().begin(SOMEWHERE)
    assert (work.key, work.prompt_tokens, work.answer_tokens) == (("r", 1), [1, 2, 3], 0)


def test_looking_at_the_next_attempt_copies_no_prompt() -> None:
    work = Work(AttemptKey("r", 1), [1, 2, 3], Sampling(), 10, frozenset())
    request = RetryState(work, max_deaths=2, max_attempts=5)
    assert request.begin(SOMEWHERE) is request.work is work
    request.emitted(Tokens([7], None))
    request.end(DRAINED)
    assert request.decide() is None
    retried = request.work
    assert request.begin(SOMEWHERE) is request.work is retried


def test_a_retry_continues_after_the_emitted_tokens() -> None:
    request = retry_state()
    request.begin(SOMEWHERE)
    request.emitted(Tokens([7], None))
    request.emitted(Tokens([8, 9], None))
    request.end(DEATH)
    assert request.decide() is None
    work = request.begin(SOMEWHERE)
    assert (work.key, work.prompt_tokens) == (("r", 2), [1, 2, 3, 7, 8, 9])
    assert (work.answer_tokens, work.max_tokens, work.tokens_wanted) == (3, 10, 7)
    assert (work.sampling.seed, work.stop_token_ids) == (9, {4})


def test_placements_give_the_reason_of_each_attempt() -> None:
    request = retry_state()
    attempt(request, DEATH)
    attempt(request, death())
    request.begin(Placement("p0", "d1"))
    assert [(item.decode, item.explanation) for item in request.placements] == [
        ("d0", "the least predicted time"),
        ("d0", "worker d0 was lost"),
        ("d1", "worker d0 was lost; alone, since 2 workers were lost"),
    ]


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        ([death()], None),
        ([death(), death()], None),
        ([death(), death(), death()], None),
        ([death()] * 4, None),
        ([death()] * 5, WorkerLost),
        ([death(), death(), HANG], PoisonRequest),
        ([HANG, HANG], None),
        ([HANG] * 3, PoisonRequest),
        ([death(), death(), death(CRASHED)], None),
        ([death(CRASHED)] * 4, None),
        ([death(CRASHED)] * 5, WorkerLost),
        ([death(), death(), DRAINED], None),
        ([death(), death(), death(KILLED)], None),
        ([death(), death(), death(KILLED), death(BY_US)], PoisonRequest),
        ([death(), death(), death(BY_OTHERS)], None),
        ([death(), death(), death(AMONG_US)], None),
        ([death(), death(), death(BY_US)], PoisonRequest),
        ([death(BY_US)], None),
        ([death(KILLED), death(BY_US)], None),
        ([death(BY_US), death(BY_US)], PoisonRequest),
        ([death(AMONG_US), death(BY_US)], PoisonRequest),
        ([death(BY_US), death(KILLED)], None),
        ([death(KILLED)] * 100, None),
        ([DRAINED] * 100, None),
        ([REFUSED] * 100, None),
        ([SILENT] * 4, None),
        ([SILENT] * 5, Unavailable),
        ([*[death(KILLED), DRAINED, REFUSED] * 50, *[SILENT] * 4], None),
        ([*[death(KILLED), DRAINED, REFUSED] * 50, *[SILENT] * 5], Unavailable),
        ([FULL] * 5, Exhausted),
        ([FINAL], Internal),
        ([death(), FINAL], Internal),
    ],
)
def test_which_ends_are_final(ends: list[AttemptEnded], error: type[Exception] | None) -> None:
    request = retry_state()
    outcome = None
    for ended in ends:
        assert outcome is None
        outcome = attempt(request, ended)
    assert type(outcome) is (error or type(None))


@pytest.mark.parametrize("refusal", [FULL, REFUSED, DRAINED])
def test_a_refused_request_backs_off_and_a_lost_one_does_not(refusal: AttemptEnded) -> None:
    request = retry_state(attempts=100)
    delays = []
    for ended in (DEATH, *[refusal] * 23):
        attempt(request, ended)
        delays.append(request.delay)
    assert delays[0] == 0.0
    assert 0.0 < delays[1] < delays[2] < delays[3] < delays[-1] == 1.0


def test_a_request_that_lost_workers_runs_alone_until_a_verdict_acquits_it() -> None:
    request, losses = retry_state(), [Loss(process) for process in (1, 2)]
    known = Losses()
    seen = [(request.suspicion, request.work.alone)]
    for loss in losses:
        known.add(loss)
        attempt(request, AttemptEnded(WorkerLost("gone"), retry=True, loss=loss))
        seen.append((request.suspicion, request.begin(SOMEWHERE).alone))
    known.judge([Verdict(incarnation=2, ended="killed")])
    seen.append((request.suspicion, request.begin(SOMEWHERE).alone))
    known.revive(1)
    seen.append((request.suspicion, request.begin(SOMEWHERE).alone))
    assert seen == [
        (Suspicion.NONE, False),
        (Suspicion.SUSPECT, False),
        (Suspicion.ALONE, True),
        (Suspicion.SUSPECT, False),
        (Suspicion.NONE, False),
    ]


def test_only_a_request_alone_waits_for_a_verdict_while_attempts_are_left() -> None:
    request, waits = retry_state(), []
    for process in (1, 2, 3):
        request.begin(SOMEWHERE)
        request.end(AttemptEnded(WorkerLost("gone"), retry=True, loss=Loss(process)))
        waits.append(request.awaits_verdict)
        request.decide()
    assert waits == [False, False, True]


@pytest.mark.parametrize(("verdict", "error"), [(KILLED, None), (BY_US, WorkerLost)])
def test_the_last_attempt_waits_for_the_verdict_that_may_acquit_it(
    verdict: Verdict, error: type[Exception] | None
) -> None:
    request, loss = retry_state(attempts=2), Loss(1)
    attempt(request, SILENT)
    request.begin(SOMEWHERE)
    request.end(AttemptEnded(WorkerLost("gone"), retry=True, loss=loss))
    assert request.awaits_verdict
    loss.verdict = verdict
    assert not request.awaits_verdict
    assert type(request.decide()) is (error or type(None))


def test_a_final_error_awaits_no_verdict() -> None:
    request = retry_state(attempts=2)
    attempt(request, death())
    request.begin(SOMEWHERE)
    request.end(FINAL)
    assert not request.awaits_verdict


def test_no_verdict_is_awaited_on_a_hung_engine() -> None:
    request = retry_state(deaths=1)
    attempt(request, death())
    request.begin(SOMEWHERE)
    request.end(HANG)
    assert not request.awaits_verdict
    assert isinstance(request.decide(), PoisonRequest)


@pytest.mark.parametrize(
    ("verdict", "finding"),
    [
        (None, Finding.SUSPECT),
        (CRASHED, Finding.SUSPECT),
        (KILLED, Finding.INNOCENT),
        (BY_OTHERS, Finding.INNOCENT),
        (AMONG_US, Finding.SUSPECT),
        (BY_US, Finding.CULPRIT),
    ],
)
def test_what_a_verdict_says_of_a_request(verdict: Verdict | None, finding: Finding) -> None:
    assert Loss(1, verdict).finding("r") is finding


def test_the_first_verdict_on_a_loss_stands() -> None:
    losses, loss = Losses(), Loss(1)
    losses.add(loss)
    losses.judge([Verdict(incarnation=2, ended="another's")])
    assert loss.is_open
    losses.revive(1)
    losses.judge([Verdict(incarnation=1, ended="later it crashed", crashed=True)])
    assert loss.verdict is not None
    assert not loss.verdict.crashed
