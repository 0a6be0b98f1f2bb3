from __future__ import annotations

import pytest

from baton.core.errors import (
    DeadlineExceeded,
    Exhausted,
    Internal,
    Unavailable,
    WorkerDrained,
    WorkerLost,
)
from baton.core.types import AttemptKey, FinishReason, Logprobs, Role, Sampling, Work
from baton.core.wire import failed_to, finish_to
from baton.router.placement.placement import FetchPlan, Placement
from baton.router.requests.attempt import (
    Action,
    Attempt,
    AttemptEnded,
    AttemptEvent,
    LinkLost,
    Send,
    Tokens,
    merge_tokens,
)
from baton.router.requests.verdicts import Loss
from baton.v1 import worker_pb2 as pb

KEY = AttemptKey("r", 3)
LOSS = Loss(process=1)
SPLIT = Placement("p0", "d0")
LOCAL = Placement("", "d0")
ONE_TOKEN = Placement("p0", "")


def attempt(placement: Placement = SPLIT) -> Attempt:
    work = Work(KEY, [1, 2, 3], Sampling(), 9, frozenset())
    agents = ("agent-p" if placement.prefill else "", "agent-d" if placement.decode else "")
    return Attempt(work, placement, *agents)


def started(placement: Placement = SPLIT) -> Attempt:
    made = attempt(placement)
    made.start()
    return made


def reserved() -> pb.WorkerMessage:
    return pb.WorkerMessage(reserved=pb.Reserved(request_id="r", epoch=3, ticket=b"ticket"))


def first(token: int, finish: FinishReason | None = None) -> pb.WorkerMessage:
    message = pb.FirstToken(request_id="r", epoch=3, token=token, finish_reason=finish_to(finish))
    return pb.WorkerMessage(first_token=message)


def step(token: int, finish: FinishReason | None = None) -> pb.StepTokens:
    return pb.StepTokens(
        request_id="r", epoch=3, token_ids=[token], finish_reason=finish_to(finish)
    )


def pushed() -> pb.WorkerMessage:
    return pb.WorkerMessage(pushed=pb.Pushed(request_id="r", epoch=3))


def feed(made: Attempt, *events: AttemptEvent) -> list[Action]:
    return [action for event in events for action in made.handle(event)]


def kinds(sends: list[Send]) -> list[tuple[Role, str | None]]:
    return [(send.role, send.message.WhichOneof("kind")) for send in sends]


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (SPLIT, [(Role.DECODE, "reserve"), (Role.PREFILL, "prefill")]),
        (LOCAL, [(Role.DECODE, "compute")]),
        (ONE_TOKEN, [(Role.PREFILL, "prefill")]),
    ],
)
def test_it_asks_the_workers_of_its_placement(
    placement: Placement, expected: list[tuple[Role, str]]
) -> None:
    assert kinds(attempt(placement).start()) == expected


def test_prefill_is_told_who_else_has_pages_of_the_prompt() -> None:
    work = Work(KEY, [1, 2, 3], Sampling(), 9, frozenset())
    placement = Placement("p0", "d0", fetch=FetchPlan("d1", 3, 48, 0.5))
    _, prefill = Attempt(work, placement, "agent-p", "agent-d", "agent-h").start()
    assert prefill.message.prefill.holder == pb.Holder(agent="agent-h", pages=3, seconds=0.5)
    _, prefill = Attempt(work, placement, "agent-p", "agent-d", "").start()
    assert not prefill.message.prefill.HasField("holder"), "it has gone meanwhile"


def test_the_ticket_is_passed_on() -> None:
    (send,) = feed(started(), reserved())
    assert isinstance(send, Send)
    assert (send.role, send.message.deliver.ticket) == (Role.PREFILL, b"ticket")


def test_tokens_of_decode_that_overtake_token_one_are_held_back() -> None:
    made = started()
    assert feed(made, reserved(), step(8))[1:] == []
    assert feed(made, first(7)) == [Tokens([7], None), Tokens([8], None)]
    assert feed(made, step(9, FinishReason.STOP)) == [Tokens([9], FinishReason.STOP)]


def test_without_prefill_the_first_token_is_decodes() -> None:
    assert feed(started(LOCAL), step(7)) == [Tokens([7], None)]


def test_token_one_counts_once() -> None:
    assert feed(started(), first(7), first(7)) == [Tokens([7], None)]


@pytest.mark.parametrize(
    ("placement", "events", "released"),
    [
        (SPLIT, [], [Role.PREFILL, Role.DECODE]),
        (SPLIT, [reserved(), first(7), pushed()], [Role.DECODE]),
        (SPLIT, [reserved(), first(7), step(8)], [Role.DECODE]),
        (SPLIT, [first(7, FinishReason.STOP)], [Role.DECODE]),
        (SPLIT, [reserved(), first(7), step(8, FinishReason.STOP)], []),
        (SPLIT, [LinkLost("d0", "gone", LOSS)], [Role.PREFILL]),
        (SPLIT, [LinkLost("d0", "left")], [Role.PREFILL, Role.DECODE]),
        (ONE_TOKEN, [first(7, FinishReason.LENGTH)], []),
        (LOCAL, [step(7)], [Role.DECODE]),
    ],
)
def test_what_is_still_held_is_released(
    placement: Placement, events: list[AttemptEvent], released: list[Role]
) -> None:
    made = started(placement)
    feed(made, *events)
    assert kinds(made.release()) == [(role, "release") for role in released]
    assert made.release() == []


@pytest.mark.parametrize(
    ("events", "lost", "ends"),
    [
        ([], "p0", True),
        ([reserved()], "d0", True),
        ([reserved(), first(7)], "p0", True),
        ([reserved(), first(7), pushed()], "p0", False),
        ([reserved(), first(7), step(8)], "p0", False),
        ([reserved(), first(7), step(8)], "d0", True),
    ],
)
def test_a_lost_worker_ends_the_attempt_only_while_it_is_needed(
    events: list[AttemptEvent], lost: str, ends: bool
) -> None:
    made = started()
    feed(made, *events)
    actions = feed(made, LinkLost(lost, "gone", LOSS))
    assert bool(actions) is ends
    for action in actions:
        assert isinstance(action, AttemptEnded)
        assert (action.retry, action.loss) == (True, LOSS)
        assert isinstance(action.error, WorkerLost)


@pytest.mark.parametrize(
    ("message", "retry", "unconfirmed"),
    [
        (failed_to(KEY, Internal("logits")), False, False),
        (failed_to(KEY, Exhausted("too large")), False, False),
        (failed_to(KEY, Exhausted("full now"), retry=True), True, False),
        (failed_to(KEY, Unavailable("draining")), True, False),
        (failed_to(KEY, WorkerLost("the other side")), True, True),
    ],
)
def test_a_failure_says_whether_another_attempt_may_succeed(
    message: pb.WorkerMessage, retry: bool, unconfirmed: bool
) -> None:
    (ended,) = feed(started(), message)
    assert isinstance(ended, AttemptEnded)
    assert (ended.retry, ended.loss, ended.unconfirmed) == (retry, None, unconfirmed)


def test_a_prefill_worker_whose_token_one_has_not_come_is_missed() -> None:
    made = started()
    assert feed(made, step(8)) == []
    (ended,) = feed(made, LinkLost("p0", "killed", LOSS))
    assert isinstance(ended, AttemptEnded)
    assert ended.retry


def test_a_worker_that_only_left_did_not_die() -> None:
    (ended,) = feed(started(), LinkLost("d0", "left"))
    assert isinstance(ended, AttemptEnded)
    assert (ended.retry, ended.loss, type(ended.error)) == (True, None, WorkerDrained)


def test_waiting_too_long_is_final() -> None:
    ended = started().time_out(5.0)
    assert isinstance(ended.error, DeadlineExceeded)
    assert not ended.retry


@pytest.mark.parametrize(
    ("placement", "events", "queued"),
    [
        (SPLIT, [], True),
        (SPLIT, [first(7)], True),
        (SPLIT, [reserved()], False),
        (LOCAL, [], True),
        (LOCAL, [step(7)], False),
        (ONE_TOKEN, [first(7)], False),
    ],
)
def test_it_counts_as_queued_until_a_worker_has_begun_or_promised_pages(
    placement: Placement, events: list[AttemptEvent], queued: bool
) -> None:
    made = started(placement)
    feed(made, *events)
    assert made.queued is queued


def scores(token: int) -> tuple[Logprobs, ...]:
    return (Logprobs(-0.5 * token, (token,), (-0.5 * token,)),)


def test_merged_tokens_keep_everything() -> None:
    first = Tokens([7], None, 16, scores(7), 8)
    rest = [Tokens([8], None, 0, scores(8)), Tokens([9], FinishReason.STOP, 0, scores(9))]
    together = Tokens([7, 8, 9], FinishReason.STOP, 16, scores(7) + scores(8) + scores(9), 8)
    assert merge_tokens([first, *rest]) == together
    assert merge_tokens([first]) is first


def test_merged_tokens_count_all_guesses() -> None:
    both = merge_tokens([Tokens([7, 8], None, guessed=3, accepted=1), Tokens([9], None, guessed=2)])
    assert (both.guessed, both.accepted) == (5, 1)
