"""The simulation bites: each of these mistakes, made on purpose, fails some seed."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence

import pytest

from baton.core.errors import BatonError
from baton.core.types import AttemptKey
from baton.decode_worker.decode_phase import Loans
from baton.decode_worker.decode_scheduler import DecodeScheduler
from baton.engine.engine import Engine
from baton.engine.page_groups import GroupedLease, GroupedPool
from baton.engine.prefix_cache import PrefixCache
from baton.engine.second_tier import SecondTier
from baton.engine.sequence import Sequence
from baton.engine.step import Checked, Drawn, FinishedStep, InFlightStep, Plan, check_guesses
from baton.engine.tier_copies import Save
from baton.kv_transfer import receiver, sender, transfers
from baton.kv_transfer.receiver import Receiver
from baton.kv_transfer.sender import Sender
from baton.kv_transfer.transfer_events import Fetched, PagesWanted
from baton.kv_transfer.transfer_protocol import drained_note, key_of
from baton.kv_transfer.transfers import Transfers
from baton.prefill_worker.prefill_phase import Fetches, PrefillPhase
from baton.prefill_worker.prefill_scheduler import PrefillSequence, PromptFetch
from baton.router.requests.attempt import Action, Attempt, LinkLost
from baton.v1 import worker_pb2 as pb
from baton.v1.transfer_pb2 import Fetch as FetchNote
from baton.v1.transfer_pb2 import Resend, TransferNote
from baton.worker import step_pipeline
from baton.worker.held_leases import HeldLeases

from . import engine as simulated_engine
from . import worker as simulated
from .cluster import Cluster
from .engine import SimulatedSpeculation, _Run
from .world import Violation

SEEDS = 2500
RARE = {
    "free_at_once": 39,
    "let_quarantine_expire": 313,
    "ignore_epochs": 126,
    "never_say_drained": 48,
    "say_drained_too_early": 45,
    "forget_dead_senders": 40,
    "ignore_what_routers_say_of_the_dead": 171,
    "believe_that_the_dead_are_silent": 654,
    "trust_a_silent_connection": 30,
    "break_the_neighbours_too": 438,
    "send_again_twice": 137,
    "forget_token_one": 325,
    "free_what_is_being_fetched": 355,
    "believe_that_all_was_fetched": 35,
    "lend_twice": 123,
}
"""Seeds to begin with, of mistakes that few seeds see."""
Patch = pytest.MonkeyPatch


def free_at_once(patch: Patch) -> None:
    """Pages that a sender may write to are freed when they are not wanted any more."""
    released = (receiver.ReceiverState.OPEN, receiver.ReceiverStep.RELEASED)
    patch.setitem(receiver.TRANSITIONS, released, receiver.ReceiverState.FREED)


def let_quarantine_expire(patch: Patch) -> None:
    """A long time is taken for a proof."""
    revoke = Receiver._revoke
    revoked: Counter[Receiver] = Counter()

    def give_up(self: Receiver, now: float) -> list[receiver.ReceiverAction]:
        actions = revoke(self, now)
        revoked[self] += bool(actions)
        return self._move(receiver.ReceiverStep.DRAINED) if revoked[self] > 5 else actions

    patch.setattr(Receiver, "_revoke", give_up)


def write_without_a_lease(patch: Patch) -> None:
    """A ticket alone allows writes."""
    ticket = (sender.SenderState.WAITING, sender.SenderStep.TICKET)
    patch.setitem(sender.TRANSITIONS, ticket, sender.SenderState.PUSHING)


def ignore_epochs(patch: Patch) -> None:
    """A note of an earlier attempt counts for a later one."""
    handle = Transfers._on_sender_note

    def on_note(self: Transfers, peer: str, note: TransferNote) -> None:
        if key_of(note) not in self._receivers:
            later = [key for key in self._receivers if key.request_id == note.request_id]
            note.epoch = max((key.epoch for key in later), default=note.epoch)
        handle(self, peer, note)

    patch.setattr(Transfers, "_on_sender_note", on_note)


def never_say_drained(patch: Patch) -> None:
    for module in (sender, transfers):
        patch.setattr(module, "drained_note", lambda key: b"")


def say_drained_too_early(patch: Patch) -> None:
    """Drained is said while a write is under way."""

    def fail(self: Sender, error: BatonError) -> list[sender.SenderAction]:
        if self.state in (sender.SenderState.DRAINING, sender.SenderState.DONE):
            return []
        self._move(sender.SenderStep.GIVE_UP)
        self._error = error
        if self._writing is None:
            return self._drain()
        return [sender.SendNote(drained_note(self.key)), sender.PushFailed(self.key, error)]

    patch.setattr(Sender, "fail", fail)


def forget_dead_senders(patch: Patch) -> None:
    patch.setattr(Transfers, "_receivers_from", lambda self, agent: [])


def ignore_what_routers_say_of_the_dead(patch: Patch) -> None:
    patch.setattr(Transfers, "_sender_died", lambda self, agent: None)


def believe_that_the_dead_are_silent(patch: Patch) -> None:
    """Nothing that a process has sent is expected after its end."""
    patch.setattr(simulated, "LINGER_SECONDS", 0.0)


def trust_a_silent_connection(patch: Patch) -> None:
    """A decode worker that does not answer counts as connected."""
    patch.setattr(Transfers, "_peer_silent", lambda self, peer, error: None)


def break_the_neighbours_too(patch: Patch) -> None:
    """A request that cannot be computed takes the others of its step with it."""

    def launch(engine: Engine, plan: Plan) -> InFlightStep:
        try:
            return engine.launch(plan)
        except BatonError as error:
            return FinishedStep([error] * len(plan))

    patch.setattr(step_pipeline, "launch", launch)


def use_damaged_pages(patch: Patch) -> None:
    patch.setattr(Transfers, "_damaged", lambda self, receiver, note: [])


def send_again_twice(patch: Patch) -> None:
    """An order to write pages again that comes twice is carried out twice."""
    carry_out = Sender.resend

    def resend(self: Sender, order: Resend, now: float) -> list[sender.SenderAction]:
        if order.round == self._round:
            self._round -= 1
        return carry_out(self, order, now)

    patch.setattr(Sender, "resend", resend)


def free_what_a_write_reads(patch: Patch) -> None:
    """Prefill frees a cancelled prompt's pages without waiting for its write."""
    leave = PrefillPhase._leave

    def free(self: PrefillPhase, job: PrefillSequence) -> None:
        leave(self, job)
        self._leaving.free(job.work.key)

    patch.setattr(PrefillPhase, "_leave", free)


def free_what_is_running(patch: Patch) -> None:
    """Decode lets go of a finished request's pages twice."""
    free = HeldLeases.free

    def twice(self: HeldLeases, key: AttemptKey) -> None:
        lease = self._leases.get(key)
        free(self, key)
        if lease is not None and self._written:
            lease.release()

    patch.setattr(HeldLeases, "free", twice)


def forget_to_free(patch: Patch) -> None:
    """Decode keeps the pages of a reservation that was given up."""
    patch.setattr(HeldLeases, "free", lambda self, key: self._leases.pop(key, None))


def know_before_it_arrived(patch: Patch) -> None:
    """Decode shares the pages of a prompt that is still on its way."""
    grant = DecodeScheduler.grant

    def named(self: DecodeScheduler) -> list[Sequence]:
        granted = grant(self)
        for each in granted:
            each.settle(len(each.tokens))
        return granted

    patch.setattr(DecodeScheduler, "grant", named)


def know_before_the_step_has_ended(patch: Patch) -> None:
    """Pages are shared as soon as the step that fills them is launched."""
    depart = _Run.__init__

    def named(self: _Run, sequence: Sequence, count: int) -> None:
        depart(self, sequence, count)
        if self.end <= len(self.tokens):
            sequence.settle(self.end)

    patch.setattr(_Run, "__init__", named)


def evict_what_is_leased(patch: Patch) -> None:
    """A cached page that a lease takes still counts as idle."""
    patch.setattr(PrefixCache, "wake", lambda self, page: None)


def count_held_pages_twice(patch: Patch) -> None:
    """Prefill's pages go where the receiver's next ones are, whatever it holds already."""
    patch.setattr(Sender, "_without_held", lambda self, pages: list(pages))


def know_before_it_was_fetched(patch: Patch) -> None:
    """Prefill shares pages that are still on their way from a cache."""
    begin = Fetches.begin

    def named(
        self: Fetches, key: AttemptKey, holder: pb.Holder, keys: AbstractSequence[bytes]
    ) -> PromptFetch | None:
        fetch = begin(self, key, holder, keys)
        if fetch is not None:
            fetch.lease.name(fetch.keys)
        return fetch

    patch.setattr(Fetches, "begin", named)


def free_what_is_being_fetched(patch: Patch) -> None:
    """Prefill frees pages that did not come in time, without waiting for the holder."""
    fail = Fetches.fail

    def free(self: Fetches, key: AttemptKey) -> None:
        fail(self, key)
        self.free(key)

    patch.setattr(Fetches, "fail", free)


def believe_that_all_was_fetched(patch: Patch) -> None:
    """Pages count as fetched that the holder did not have."""
    arrive = Fetches.arrive

    def arrived(self: Fetches, event: Fetched) -> None:
        whole = len(self._fetches[event.key].awaited)
        arrive(self, dataclasses.replace(event, pages=whole))

    patch.setattr(Fetches, "arrive", arrived)


def lend_without_a_lease(patch: Patch) -> None:
    """Decode lets go of what it lends at once."""
    answer = Loans.answer

    def lent(self: Loans, wanted: PagesWanted) -> None:
        answer(self, wanted)
        self.free(wanted.key)

    patch.setattr(Loans, "answer", lent)


def lend_twice(patch: Patch) -> None:
    """A note that comes twice is answered twice."""
    report = Transfers._report_fetch

    def again(self: Transfers, key: AttemptKey, peer: str, note: FetchNote) -> None:
        self._reported_fetches.clear()
        report(self, key, peer, note)

    patch.setattr(Transfers, "_report_fetch", again)


def save_without_a_lease(patch: Patch) -> None:
    """A page that is being copied may be handed out, and is trusted to have been copied before."""
    begin = SecondTier._save

    def unheld(self: SecondTier, batch: list[tuple[bytes, int]]) -> None:
        begin(self, batch)
        if self._saving is not None:
            self._saving.lease.release()

    def trust(self: SecondTier, save: Save) -> None:
        self._saving = None
        for key, row in zip(save.keys, save.rows.pages, strict=True):
            self._store(key, row)

    patch.setattr(SecondTier, "_save", unheld)
    patch.setattr(SecondTier, "_end_save", trust)


def know_before_it_is_restored(patch: Patch) -> None:
    """Pages are shared while they are on their way from the second tier."""
    restore_pages = SecondTier.restore_pages

    def named(self: SecondTier, keys: AbstractSequence[bytes]) -> int:
        count = restore_pages(self, keys)
        for job in self._restoring:
            job.lease.name(job.keys)
        return count

    patch.setattr(SecondTier, "restore_pages", named)


def give_back_too_early(patch: Patch) -> None:
    """The page that a window has not quite passed goes too."""
    firsts = GroupedPool.first_pages

    def advance(self: GroupedLease, tokens: int) -> None:
        for number, first in enumerate(firsts(self._grouped, tokens + self._pool.page_size)):
            if self._passed[number] < first < len(self._tables[number]):
                self._pass(number, first)

    patch.setattr(GroupedLease, "advance", advance)


def give_back_what_is_running(patch: Patch) -> None:
    """Pages are given back by what was launched, not by what has settled."""

    def settle(self: Sequence, computed: int) -> None:
        self.lease.name(self.chain.keys(self.tokens, computed))
        self.lease.advance(self.computed)

    patch.setattr(Sequence, "settle", settle)


def list_by_another_length(patch: Patch) -> None:
    """Prefill lists the pages in reach of its last chunk, not of the prompt's end."""
    listed = GroupedLease.listed

    def longer(self: GroupedLease, start: int, end: int, tokens: int) -> list[int]:
        return listed(self, start, end, tokens - self._pool.page_size)

    patch.setattr(GroupedLease, "listed", longer)


def repeat_token_one(patch: Patch) -> None:
    """Tokens of decode that overtook token #1 are not held back."""
    step = Attempt._step

    def at_once(self: Attempt, tokens: pb.StepTokens) -> list[Action]:
        actions = step(self, tokens)
        early, self._early = self._early, []
        return [*early, *actions]

    patch.setattr(Attempt, "_step", at_once)


def forget_token_one(patch: Patch) -> None:
    """A prefill worker whose token #1 has not come is not missed once decode writes."""
    lose = Attempt._lose

    def shrug(self: Attempt, lost: LinkLost) -> list[Action]:
        prefill = lost.worker_id == self.placement.prefill
        return [] if prefill and self.decoding else lose(self, lost)

    patch.setattr(Attempt, "_lose", shrug)


def accept_a_wrong_guess(patch: Patch) -> None:
    """What was sampled behind a wrong guess counts."""

    def check(guesses: list[int], drawn: list[Drawn]) -> Checked:
        right = check_guesses(guesses, drawn)
        return Checked(drawn[: len(right.drawn) + 1], right.guesses)

    patch.setattr(simulated_engine, "check_guesses", check)


def guess_beyond_the_last_token(patch: Patch) -> None:
    """Guesses may reach past what max_tokens allows."""
    guess = SimulatedSpeculation.guess

    def longer(self: SimulatedSpeculation, plan: Plan, *limits: object) -> None:
        works = {each: each.work for each in plan}
        for each, work in works.items():
            each.work = dataclasses.replace(work, max_tokens=work.max_tokens + 3)
        guess(self, plan, *limits)  # type: ignore[arg-type]
        for each, work in works.items():
            each.work = work

    patch.setattr(SimulatedSpeculation, "guess", longer)


MUTATIONS: list[Callable[[Patch], None]] = [
    free_at_once,
    let_quarantine_expire,
    write_without_a_lease,
    ignore_epochs,
    never_say_drained,
    say_drained_too_early,
    forget_dead_senders,
    ignore_what_routers_say_of_the_dead,
    believe_that_the_dead_are_silent,
    trust_a_silent_connection,
    break_the_neighbours_too,
    use_damaged_pages,
    send_again_twice,
    free_what_a_write_reads,
    free_what_is_running,
    forget_to_free,
    forget_token_one,
    repeat_token_one,
    know_before_it_arrived,
    know_before_the_step_has_ended,
    evict_what_is_leased,
    count_held_pages_twice,
    know_before_it_was_fetched,
    free_what_is_being_fetched,
    believe_that_all_was_fetched,
    lend_without_a_lease,
    lend_twice,
    save_without_a_lease,
    know_before_it_is_restored,
    give_back_too_early,
    give_back_what_is_running,
    list_by_another_length,
    accept_a_wrong_guess,
    guess_beyond_the_last_token,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_mistake_is_caught(
    mutate: Callable[[Patch], None], monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "baton.kv_transfer")
    mutate(monkeypatch)
    fail_some_seed(Cluster, RARE.get(mutate.__name__, 0))


def fail_some_seed(kind: Callable[[int], Cluster], first: int = 0) -> None:
    for seed in (*range(first, SEEDS), *range(first)):
        try:
            kind(seed).run()
        except Exception as error:  # noqa: BLE001 - a mistake may show in any way
            print(f"seed {seed}: {type(error).__name__}: {error}")
            return
    pytest.fail(f"{SEEDS} seeds saw nothing wrong")


def test_a_failing_seed_fails_again_in_the_same_way(monkeypatch: Patch) -> None:
    free_at_once(monkeypatch)
    traces = []
    for _ in range(2):
        seed = next(seed for seed in range(RARE["free_at_once"], SEEDS) if fails(seed))
        cluster = Cluster(seed, trace=True)
        with pytest.raises(Violation):
            cluster.run()
        traces.append(cluster.world.trace)
    assert traces[0] == traces[1]


def fails(seed: int) -> bool:
    try:
        Cluster(seed).run()
    except Violation:
        return True
    return False
