"""What a prefill worker fetches and a decode worker lends; each is driven by hand."""

from __future__ import annotations

import pytest

from baton.core.errors import DeadlineExceeded
from baton.core.page_keys import KeyChain
from baton.core.types import AttemptKey, Role, Sampling, Work
from baton.core.wire import work_to
from baton.decode_worker.decode_phase import MOST_LOANS, DecodePhase
from baton.kv_transfer.transfer_events import (
    Fetched,
    PagesWanted,
    PushEnded,
    PushOverdue,
    ReservationFailed,
    ReservationFreed,
    ReservationOverdue,
)
from baton.kv_transfer.transfer_protocol import seal
from baton.prefill_worker.prefill_phase import PrefillPhase
from baton.v1 import worker_pb2 as pb
from baton.v1.transfer_pb2 import TicketBody

from .engine import fingerprint
from .test_cache import PAGE, PROMPT, Driven
from .worker import LAYOUT

KEY = AttemptKey("request", 1)


class Prefill(Driven):
    """A prefill worker, and a decode worker's agent that it is told to fetch from."""

    def __init__(self, pages: int = 12) -> None:
        super().__init__(Role.PREFILL, pages=pages)
        assert isinstance(self.role, PrefillPhase)
        self.fetches = self.role._fetches

    def ask_with_holder(self, name: str, prompt: list[int], pages: int = 9) -> None:
        work = work_to(Work(AttemptKey(name, 1), prompt, Sampling(), 1, frozenset()))
        holder = pb.Holder(agent="decode0.2", pages=pages, seconds=5.0)
        self.role.on_message(1, pb.RouterMessage(prefill=pb.Prefill(work=work, holder=holder)), 0.0)
        self.run()

    def write(self, prompt: list[int], count: int) -> None:
        """As the holder does: the pages that are waited for, as many as it has."""
        lease = self.fetches._fetches[KEY].lease
        for place in range(lease.found, lease.found + count):
            for cell in range(PAGE):
                position = place * PAGE + cell
                memory = self.worker.engine.memory[lease.pages[place]]
                memory[cell] = fingerprint(prompt[position], position, 0)

    @property
    def first_tokens(self) -> list[pb.FirstToken]:
        return [m.first_token for m in self.sent if m.HasField("first_token")]


def test_a_prompt_waits_for_what_is_fetched_and_computes_the_rest() -> None:
    prefill = Prefill()
    prefill.ask_with_holder("request", PROMPT)
    assert (prefill.first_tokens, prefill.pool.leased) == ([], 2)
    prefill.ask("other", [1, 2, 3])
    prefill.run()
    assert [first.request_id for first in prefill.first_tokens] == ["other"], "nobody else waits"
    prefill.write(PROMPT, 2)
    prefill.role.on_transfer(Fetched(KEY, 2, 0.25))
    prefill.run()
    fetched = prefill.first_tokens[-1]
    assert (fetched.cached_tokens, fetched.fetched_tokens, fetched.fetch_seconds) == (4, 4, 0.25)
    prefill.answer("again", PROMPT)
    assert prefill.first_tokens[-1].token == fetched.token
    assert prefill.first_tokens[-1].fetched_tokens == 0
    assert prefill.role.load().fault == ""


def test_only_what_is_missing_is_fetched_and_what_came_of_it_is_used() -> None:
    prefill = Prefill()
    prefill.answer("first", PROMPT[:3])
    prefill.ask_with_holder("request", [*PROMPT, 16, 17, 18, 19])
    assert len(prefill.fetches._fetches[KEY].awaited) == 3
    prefill.write(PROMPT, 1)
    prefill.role.on_transfer(Fetched(KEY, 1, 0.25))
    prefill.run()
    assert prefill.first_tokens[-1].cached_tokens == 4
    assert prefill.first_tokens[-1].fetched_tokens == 2
    assert prefill.pool.check_integrity(held=0) == ""


def test_prompts_that_go_on_alike_wait_for_one_fetch() -> None:
    prefill = Prefill()
    for name in ("request", "like it"):
        prefill.ask_with_holder(name, PROMPT)
    assert (prefill.first_tokens, prefill.pool.leased) == ([], 2)
    prefill.write(PROMPT, 2)
    prefill.role.on_transfer(Fetched(KEY, 2, 0.25))
    prefill.run()
    assert [first.cached_tokens for first in prefill.first_tokens] == [4, 4]


@pytest.mark.parametrize("error", [None, DeadlineExceeded("too late")])
def test_a_prompt_is_computed_when_nothing_comes_and_the_pages_are_kept_while_they_may_be_written(
    error: DeadlineExceeded | None,
) -> None:
    prefill = Prefill()
    prefill.ask_with_holder("request", PROMPT)
    prefill.role.on_transfer(ReservationFailed(KEY, error))
    prefill.run()
    (first,) = prefill.first_tokens
    assert (first.cached_tokens, first.fetched_tokens) == (0, 0)
    assert first.fetch_seconds > 0
    assert prefill.pool.leased == 2
    prefill.role.on_transfer(ReservationOverdue(KEY))
    load = prefill.role.load()
    assert (load.leased_pages, load.quarantined_pages, load.fault) == (0, 2, "")
    prefill.role.on_transfer(ReservationFreed(KEY))
    assert prefill.pool.check_integrity(held=0) == ""


def test_a_cancelled_prompt_lets_go_of_what_it_fetches_once_that_is_safe() -> None:
    prefill = Prefill()
    prefill.ask_with_holder("request", PROMPT)
    release = pb.Release(request_id=KEY.request_id, epoch=KEY.epoch)
    prefill.role.on_message(1, pb.RouterMessage(release=release), 0.0)
    assert (prefill.role.idle, prefill.pool.leased) == (True, 2)
    assert prefill.role.load().fault == ""
    prefill.role.on_transfer(ReservationFreed(KEY))
    assert prefill.pool.check_integrity(held=0) == ""


def test_nothing_is_fetched_where_prompts_wait_for_pages() -> None:
    prefill = Prefill(pages=3)
    held = prefill.pool.acquire(1)
    prefill.ask_with_holder("request", PROMPT)
    assert prefill.pool.leased == 1
    held.release()
    prefill.run()
    assert prefill.first_tokens[0].fetch_seconds == 0


class Decode(Driven):
    """A decode worker that holds the two full pages of PROMPT, and one of its answer."""

    def __init__(self) -> None:
        super().__init__(Role.DECODE)
        assert isinstance(self.role, DecodePhase)
        self.loans = self.role._loans
        self.answer("first", PROMPT)

    def want(self, name: str, prompt: list[int]) -> None:
        chain: KeyChain = self.pool.chain("")
        key, keys = AttemptKey(name, 1), chain.keys(prompt, len(prompt))
        body = TicketBody(
            request_id=name,
            epoch=1,
            agent="prefill0.1",
            pages=range(len(keys)),
            expires_after_seconds=5.0,
            lease_seconds=1.0,
        )
        ticket = seal(body, LAYOUT)
        self.role.on_transfer(PagesWanted(key, "prefill0.1", ticket, tuple(keys)))


def test_decode_lends_what_it_has_until_the_push_has_ended() -> None:
    decode = Decode()
    decode.want("request", [*PROMPT[:4], 9, 9])
    assert (len(decode.loans.pages), decode.pool.leased) == (2, 2)
    assert decode.role.load().fault == ""
    decode.role.on_transfer(PushEnded(KEY, None, 64, 0.1, 0.1))
    assert decode.pool.check_integrity(held=0) == ""


def test_decode_lends_nothing_that_it_does_not_have() -> None:
    decode = Decode()
    decode.want("request", [9, *PROMPT])
    assert decode.pool.leased == 0


def test_decode_does_not_lend_without_end() -> None:
    decode = Decode()
    for number in range(MOST_LOANS + 1):
        decode.want(f"request {number}", PROMPT[:2])
    assert len(decode.loans) == MOST_LOANS


def test_pages_that_a_stuck_write_reads_count_as_quarantined() -> None:
    decode = Decode()
    decode.want("request", PROMPT[:4])
    decode.role.on_transfer(PushOverdue(KEY))
    assert decode.role.load().quarantined_pages == 2
    decode.role.on_transfer(PushEnded(KEY, None, 0, 0.1, 0.0))
    assert decode.role.load().quarantined_pages == 0
