"""What the roles put into their caches, and when; each worker is driven by hand."""

from __future__ import annotations

import pytest

from baton.core.config import Config, with_device_defaults
from baton.core.errors import Internal
from baton.core.types import AttemptKey, Role, Sampling, Work
from baton.core.wire import work_to
from baton.engine.step import FinishedStep, InFlightStep, Plan
from baton.kv_transfer.transfer_events import Arrived, ReservationFreed
from baton.kv_transfer.transfer_protocol import open_ticket
from baton.v1 import worker_pb2 as pb

from .fabric import Fabric
from .router import SimulatedRouter
from .streams import Stream
from .worker import LAYOUT, SimulatedWorker
from .world import World

PAGE = 2
PROMPT = [11, 12, 13, 14, 15]


class Driven:
    """One worker, and what it tells its router."""

    def __init__(self, kind: Role, *, runs_ahead: bool = False, pages: int = 12) -> None:
        world = World(0)
        self.worker = SimulatedWorker(
            *(world, Fabric(world, lambda write: None), f"{kind.value}0", kind),
            with_device_defaults(Config(page_size=PAGE), "cpu"),
            pages=pages,
            digests=not runs_ahead,
            incarnation=1,
        )
        self.role, self.pool = self.worker.role, self.worker.engine.pool
        stream = Stream(world, SimulatedRouter(world, "router", lambda *_: None), self.worker, 1)
        self.sent: list[pb.WorkerMessage] = []
        stream.to_router = self.sent.append  # type: ignore[assignment, method-assign]
        self.worker.attach(stream)

    def ask(self, name: str, prompt: list[int], max_tokens: int = 2, salt: str = "") -> None:
        key = AttemptKey(name, 1)
        work = work_to(Work(key, prompt, Sampling(), max_tokens, frozenset(), cache_salt=salt))
        if self.worker.kind is Role.PREFILL:
            self.role.on_message(1, pb.RouterMessage(prefill=pb.Prefill(work=work)), 0.0)
        else:
            self.role.on_message(1, pb.RouterMessage(compute=pb.Compute(work=work)), 0.0)

    def reserve(self, name: str, prompt: list[int]) -> pb.Reserved:
        work = work_to(Work(AttemptKey(name, 1), prompt, Sampling(), 2, frozenset()))
        self.role.on_message(
            1, pb.RouterMessage(reserve=pb.Reserve(work=work, sender="prefill0")), 0.0
        )
        self.role.step()
        return [m.reserved for m in self.sent if m.HasField("reserved")][-1]

    def run(self) -> None:
        while self.role.step():
            pass

    def answer(self, name: str, prompt: list[int], salt: str = "") -> None:
        self.ask(name, prompt, salt=salt)
        self.run()

    @property
    def found(self) -> list[int]:
        """What each request's first token said of the cache."""
        steps = [
            tokens.cached_tokens
            for message in self.sent
            for tokens in message.step.tokens
            if tokens.queue_seconds or tokens.cached_tokens
        ]
        firsts = [m.first_token.cached_tokens for m in self.sent if m.HasField("first_token")]
        return firsts or steps

    @property
    def known(self) -> int:
        return len(self.pool.cache.keys)


def test_prefill_says_how_much_of_a_prompt_was_there() -> None:
    prefill = Driven(Role.PREFILL)
    prefill.answer("cold", PROMPT)
    prefill.answer("warm", PROMPT)
    prefill.answer("other", [*PROMPT[:2], 9, 9, 9])
    prefill.answer("salted", PROMPT, salt="tenant")
    assert prefill.found == [0, 4, 2, 0]
    assert prefill.role.load().cached_pages == 5
    assert prefill.role.load().free_pages == 12


def test_prompts_that_begin_alike_are_not_computed_at_once() -> None:
    prefill = Driven(Role.PREFILL)
    for name in ("one", "two", "three"):
        prefill.ask(name, PROMPT)
    prefill.run()
    assert prefill.found == [0, 4, 4]


@pytest.mark.parametrize("kind", list(Role))
def test_nothing_is_known_before_the_step_that_writes_it_has_ended(kind: Role) -> None:
    worker = Driven(kind, runs_ahead=True)
    worker.ask("request", PROMPT)
    worker.role.step()
    assert worker.known == 0
    worker.run()
    assert worker.known == (2 if kind is Role.PREFILL else 3)


@pytest.mark.parametrize("kind", list(Role))
def test_what_a_failed_step_wrote_or_read_is_forgotten(
    kind: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Driven(kind)
    worker.answer("first", PROMPT)
    worker.answer("sound", [1, 2, 3])
    known = worker.known

    def fail(plan: Plan) -> InFlightStep:
        return FinishedStep([Internal("not finite")] * len(plan))

    with monkeypatch.context() as patch:
        patch.setattr(worker.worker.engine, "launch", fail)
        worker.answer("second", [*PROMPT, 16])
    assert worker.sent[-1].failed.reason == Internal.reason
    assert worker.known == known - 2, "what it did not read is still there"
    assert worker.pool.check_integrity(held=0) == ""
    worker.answer("third", PROMPT)
    assert worker.found[-1] == 0


def test_decode_finds_what_it_has_written_itself() -> None:
    decode = Driven(Role.DECODE)
    decode.ask("cold", PROMPT, max_tokens=4)
    decode.run()
    answer = [token for m in decode.sent for each in m.step.tokens for token in each.token_ids]
    decode.answer("next turn", [*PROMPT, *answer, 40])
    assert decode.found[-1] == 8, "all but the last token, which was never computed"


def test_a_ticket_asks_only_for_what_is_not_there() -> None:
    decode = Driven(Role.DECODE)
    first = decode.reserve("first", PROMPT)
    assert first.cached_tokens == 0
    assert len(open_ticket(first.ticket, LAYOUT).pages) == 3
    assert decode.known == 0, "nothing has arrived"
    decode.role.on_transfer(Arrived(AttemptKey("first", 1), 7))
    assert decode.known == 2
    second = decode.reserve("second", PROMPT)
    body = open_ticket(second.ticket, LAYOUT)
    assert (second.cached_tokens, body.held_pages, len(body.pages)) == (4, 2, 1)


def test_prompts_that_arrive_twice_are_kept_once() -> None:
    decode = Driven(Role.DECODE)
    for name in ("one", "two"):
        decode.reserve(name, PROMPT)
    assert decode.pool.leased == 6
    for name in ("one", "two"):
        decode.role.on_transfer(Arrived(AttemptKey(name, 1), 7))
    assert decode.pool.leased == 4
    assert decode.pool.check_integrity() == ""


def test_a_prompt_that_was_given_up_is_not_known_though_it_arrived() -> None:
    decode = Driven(Role.DECODE)
    decode.reserve("request", PROMPT)
    key = AttemptKey("request", 1)
    release = pb.Release(request_id=key.request_id, epoch=key.epoch)
    decode.role.on_message(1, pb.RouterMessage(release=release), 0.0)
    decode.role.on_transfer(ReservationFreed(key))
    assert (decode.known, decode.pool.leased) == (0, 0)


def test_pages_in_quarantine_do_not_count_those_that_are_shared() -> None:
    decode = Driven(Role.DECODE)
    decode.answer("first", PROMPT)
    for name in ("one", "two"):
        decode.reserve(name, PROMPT)
        release = pb.Release(request_id=name, epoch=1)
        decode.role.on_message(1, pb.RouterMessage(release=release), 0.0)
    load = decode.role.load()
    assert (load.leased_pages, load.quarantined_pages, load.fault) == (4, 0, "")
    assert decode.role.idle
