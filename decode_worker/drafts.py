"""Guesses tokens with a draft model: a smaller one of the same vocabulary, which runs ahead.

    a request decodes ─▶ prefill ─▶ ready ─▶ rounds before each step ─▶ dropped with its pages
                            ▲         │                                    ▲
                            └─────────┘ behind by many tokens              │
                            └─────────┴── no page left, preempted, ended ──┘

The draft has pages of its own. It computes prompts itself, so none of its pages are transferred;
dropped pages are computed again unless its prefix cache has them.

A round runs one token of each request and samples the next as the request itself would: with its
sampling parameters, its grammar, and the noise of its seed and the position. So sampled tokens are
guessed as well as greedy ones. Rounds are run and prompts computed if that is predicted to pay, or
as a trial (decode_worker/draft_pricing.py). The best predictor of a right guess is the draft's own
probability.

On a GPU steps run ahead, but the draft continues tokens that the host must know first. The gain of
a step that waits for them is predicted from the share of right guesses alone. The cost of rounds is
measured before the first request.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from baton.core.errors import BatonError
from baton.core.online_fit import OnlineFit
from baton.core.types import AttemptKey, Sampling, Work
from baton.decode_worker.draft_pricing import (
    ANY,
    CPU_SECONDS,
    GPU_SECONDS,
    MEMORY,
    MOST_CREDIT,
    Follower,
    Pace,
    Pricing,
)
from baton.engine.acceptance import Offer
from baton.engine.draft_model import MOST_BEHIND
from baton.engine.engine import Engine
from baton.engine.page_pool import PagePool
from baton.engine.sequence import Sequence
from baton.engine.step import Drawn, InFlightStep, Outcome, Plan, token_and_logprobs
from baton.worker.step_pipeline import launch
from baton.worker.step_record import StepRecord

ROOM = 1.5
"""The draft follows a request if there is room for ROOM times its tokens. So a full pool does not
compute a prompt again and again: its request grows by half before its pages are dropped."""

REHEARSED, REHEARSED_TOKENS, REHEARSED_ROUNDS = (1, 2, 8, 32), 200, (4, 1, 2, 4, 1, 4)
"""Numbers of requests, their tokens, and the rounds with each number, to measure costs."""


class Round(NamedTuple):
    """A step of the draft in flight."""

    plan: Plan
    followers: dict[Sequence, Follower]  # by request
    step: InFlightStep


class Drafts:
    """`vocabulary` is the size of the main model's vocabulary, whose padding may differ."""

    def __init__(
        self,
        engine: Engine,
        vocabulary: int,
        chunk_tokens: int,
        record: StepRecord | None = None,
        cost: OnlineFit | None = None,
    ) -> None:
        self._engine = engine
        self._pool: PagePool = engine.pool
        self._vocabulary = min(vocabulary, engine.architecture.vocabulary_size)
        self._chunk_tokens = chunk_tokens
        self._record = record or StepRecord()
        assumed = GPU_SECONDS if engine.runs_ahead else CPU_SECONDS
        self.pricing = Pricing(cost or OnlineFit(assumed, MEMORY))
        self._followers: dict[Sequence, Follower] = {}
        self._launched = (1, 0, 0, 0)  # by the current offer: features for Pricing.note_rounds
        self._token_seconds = 0.0  # what a right guess saves
        self.seconds = 0.0  # spent on offers
        self.compared = self.right = 0  # guesses, whether the main model ran them or not

    def rehearse(self) -> None:
        """Measures the cost of rounds, before the first request."""
        self._rehearse(1)  # warms up
        self.pricing = Pricing(OnlineFit(GPU_SECONDS, MEMORY))
        for count in REHEARSED:
            self._rehearse(count)
        self.pricing.trust_measurements()
        self.seconds = 0.0

    def _rehearse(self, count: int) -> None:
        slow = Pace(1.0, 1e3, 0.0)  # every guess pays
        self.pricing.pay(-MOST_CREDIT)
        requests = [self._rehearsed(number) for number in range(count)]
        for rounds in REHEARSED_ROUNDS:
            self.offer(dict.fromkeys(requests, rounds), slow, self._engine.gpu.max_batch)
        for follower in self._followers.values():
            if not follower.failed:
                self._fail(follower)  # keeps none of its pages in the cache
        self._followers.clear()

    def _rehearsed(self, number: int) -> Sequence:
        length = min(REHEARSED_TOKENS, self._engine.context_length // 2)
        tokens = [number % self._vocabulary] * length
        work = Work(AttemptKey("", 0), tokens, Sampling(), REHEARSED_TOKENS, frozenset())
        return Sequence.queued(work, self._pool)

    def drop(self, request: Sequence) -> None:
        """Stops following a request: compares its last guesses and frees its pages."""
        follower = self._followers.pop(request, None)
        if follower and not follower.failed:
            self._follow(follower, request.tokens)
            follower.sequence.lease.release()

    def check(self) -> str:
        """Returns "" unless pages have leaked. Call it only when there are no requests."""
        return self._pool.check_integrity(held=0)

    def share(self, request: Sequence) -> float:
        """The chance that a first guess is right."""
        follower = self._followers.get(request)
        return (follower.acceptance if follower else self.pricing.seen).share(ANY)

    def waits(self, wanted: dict[Sequence, int], pace: Pace) -> bool:
        """True if the device should wait for the tokens in flight, so that guesses can follow
        them: if that is predicted to pay, or as a trial."""
        going = self._guessable(wanted, pace)
        return bool(going) and (
            self.pricing.can_try or self.pricing.pays(self._saved_share(going, pace))
        )

    def _guessable(self, wanted: dict[Sequence, int], pace: Pace) -> dict[Sequence, int]:
        """The requests that the draft may guess for, with those that it should begin to follow."""
        asking = {request: depth for request, depth in wanted.items() if depth > 0}
        begun = self._to_follow(asking, pace)
        return {each: asking[each] for each in asking if each in begun or self._can_guess(each)}

    def _saved_share(self, depths: dict[Sequence, int], pace: Pace) -> float:
        """Predicts the share of time that guesses save (`Pricing.saved_share`)."""
        shares = {request: self.share(request) for request in depths}
        return self.pricing.saved_share(shares, depths, pace)

    def _pays(self, ready: dict[Sequence, Follower], pace: Pace) -> bool:
        """True if guesses for these requests alone pay, while others are still in prefill."""
        depths = {request: each.most for request, each in ready.items()}
        return self.pricing.pays(self._saved_share(depths, pace))

    def _can_guess(self, request: Sequence) -> bool:
        """True if the draft follows the request and can compute another token."""
        follower = self._followers.get(request)
        short = len(request.tokens) + request.expected < self._engine.context_length
        return follower is not None and not follower.failed and short

    def _to_follow(self, asking: dict[Sequence, int], pace: Pace) -> list[Sequence]:
        """The requests that the draft should begin to follow: all that pay, or one as a trial."""
        others = {each: len(each.tokens) for each in asking if each not in self._followers}
        if not others or not self.pricing.can_invest:
            return []
        going = {each: asking[each] for each in asking if each in others or self._can_guess(each)}
        chosen = self.pricing.choose_prompts(others, self._saved_share(going, pace), pace.token)
        if not chosen and not self._followers and self.pricing.can_try:
            chosen = self.pricing.choose_prompts(others, 1.0, pace.token)[:1]
        return list(filter(self._can_follow, chosen))

    def offer(self, wanted: dict[Sequence, int], pace: Pace, most: int) -> dict[Sequence, Offer]:
        """Guesses for decoding requests: for each at most as many as `wanted`, and `most` in
        all."""
        began = time.monotonic()
        self._token_seconds, self._launched, tries = pace.token, (1, 0, 0, 0), self.pricing.can_try
        for request in wanted:
            if (follower := self._followers.get(request)) and not follower.failed:
                self._follow(follower, request.tokens)
        going = self._guessable(wanted, pace)
        if pays := self.pricing.pays(self._saved_share(going, pace)):
            tries = False
        if pays or tries:
            self._prefill(going if pays else self._trial(going))
            ready = self._ready(going)
            if tries or len(ready) == len(going) or self._pays(ready, pace):
                self._guess(ready, pace, most, tries)
        took = time.monotonic() - began
        self.seconds += took
        if self._launched[1]:
            self.pricing.note_rounds(self._launched, took)
            self.pricing.pay(pace.wait)
        return {
            request: Offer(each.guesses, each.chances)
            for request in going
            if (each := self._followers.get(request)) and each.kinds
        }

    def _trial(self, going: dict[Sequence, int]) -> list[Sequence]:
        """The one request for which the draft has the least to compute, as a trial."""
        behind = {each: self._behind(each) for each in going}
        return sorted(going, key=behind.__getitem__)[:1]

    def _behind(self, request: Sequence) -> int:
        follower = self._followers.get(request)
        return follower.behind if follower else len(request.tokens)

    def _ready(self, going: dict[Sequence, int]) -> dict[Sequence, Follower]:
        """The requests that a round may guess for."""
        ready = {}
        for request, depth in going.items():
            follower = self._followers.get(request)
            if follower and not follower.failed and follower.behind <= MOST_BEHIND:
                follower.most, ready[request] = depth, follower
        return ready

    def note_run(self, request: Sequence, guesses: int) -> None:
        """Notes how many of the offered guesses the main model runs."""
        if follower := self._followers.get(request):
            follower.run = guesses

    def _follow(self, follower: Follower, tokens: list[int]) -> None:
        guessed, run, came = len(follower.kinds), follower.run, len(tokens) - follower.known
        right = follower.follow(tokens)
        compared = min(guessed, came, right + 1)
        self.compared += compared
        self.right += right
        self.pricing.note_guesses(compared, self._token_seconds * min(right, run))

    def _prefill(self, requests: Iterable[Sequence]) -> None:
        """Computes a chunk of tokens that the draft has not seen, oldest requests first."""
        budget, plan, followers = self._chunk_tokens, Plan(), {}
        for request in requests:
            if request not in self._followers:
                self._start_to_follow(request)
            follower = self._followers.get(request)
            if not follower or follower.failed or budget <= 0:
                continue
            if follower.behind <= MOST_BEHIND:
                continue  # catches up in its next round
            sequence = follower.sequence
            count = sequence.cover(min(budget, sequence.uncomputed - 1), self._pool)
            if not count:
                self.drop(request)
                continue
            plan[sequence], followers[request] = count, follower
            budget -= count
        if launched := self._launch(plan, followers):
            self._settle(launched)

    def _can_follow(self, request: Sequence) -> bool:
        """True if there is room for the request and the draft can compute it."""
        tokens = request.tokens
        room = self._pool.pages_for(int(ROOM * len(tokens)) + 1) * self._pool.slices
        if request.work.alone or room > self._pool.free:
            return False
        return len(tokens) < self._engine.context_length and max(tokens) < self._vocabulary

    def _start_to_follow(self, request: Sequence) -> None:
        """Starts to follow a request, if those started before it have left room."""
        if not self._can_follow(request):
            return
        tokens, work = request.tokens, request.work
        chain = self._pool.chain(work.cache_salt)
        keys = chain.to_find(tokens)
        lease = self._pool.acquire(self._pool.pages_for(len(tokens)), keys)
        sequence = Sequence(_draft_work(work), lease, list(tokens), chain=chain)
        sequence.computed = sequence.cached_tokens
        sequence.guide = request.guide
        acceptance = self.pricing.seen.of_sequence()
        self._followers[request] = Follower(sequence, acceptance, len(tokens))

    def _guess(self, ready: dict[Sequence, Follower], pace: Pace, most: int, tries: bool) -> None:
        """Runs rounds as long as they pay; otherwise at most one, as a trial. If steps run ahead,
        rounds run ahead by one."""
        going, in_flight, pace = ready, None, self.pricing.with_overhead(pace)
        while True:
            chosen, pace = self._choose(going, pace, tries)
            tries = False
            launched = self._launch_round({each: going[each] for each in chosen[:most]})
            going = dict(launched.followers) if launched else {}
            if in_flight:
                alive = self._settle(in_flight)
                going = {request: going[request] for request in going if request in alive}
            if not launched:
                return
            most -= len(launched.plan)
            self.pricing.pay(pace.row * len(launched.plan))
            in_flight = launched._replace(followers=going)
            if not self._runs_ahead(going):
                going, in_flight = self._settle(in_flight), None

    def _choose(
        self, going: dict[Sequence, Follower], pace: Pace, tries: bool
    ) -> tuple[list[Sequence], Pace]:
        """The requests of the next round, and the pace with it."""
        chances = {
            request: each.chance for request, each in going.items() if self._wants_guess(each)
        }
        chosen, pace = self.pricing.choose(chances, pace)
        return chosen or (self.pricing.choose_trial(chances, pace) if tries else []), pace

    def _runs_ahead(self, going: dict[Sequence, Follower]) -> bool:
        """True if a round may be launched before the guesses of the one before are known."""
        known = any(each.sequence.needs_known_tokens for each in going.values())
        return self._engine.runs_ahead and not known

    def _wants_guess(self, follower: Follower) -> bool:
        """True if the request wants another guess and the draft can compute it."""
        sequence = follower.sequence
        short = len(follower.kinds) + sequence.expected < follower.most
        return short and len(sequence.tokens) + sequence.expected < self._engine.context_length

    def _launch_round(self, going: dict[Sequence, Follower]) -> Round | None:
        """Launches a round, which adds a guess to each request."""
        plan, followers = Plan(), {}
        for request, follower in going.items():
            sequence = follower.sequence
            if not self._look_ahead(follower):
                continue
            if sequence.cover(sequence.uncomputed, self._pool) < sequence.uncomputed:
                self.drop(request)
                continue
            plan[sequence], followers[request] = sequence.uncomputed, follower
        return self._launch(plan, followers)

    def _add_outcome(self, follower: Follower, outcome: Outcome) -> bool:
        """Adds the guess of an outcome. Returns False after an error, a stop token, or a token that
        the main model does not have."""
        if isinstance(outcome, BatonError):
            self._fail(follower)
        return isinstance(outcome, Drawn) and self._add(follower, outcome)

    def _add(self, follower: Follower, drawn: Drawn) -> bool:
        token, logprobs = token_and_logprobs(drawn)
        work = follower.sequence.work
        if token in work.stop_token_ids or token >= self._vocabulary or logprobs is None:
            return False
        follower.add(token, logprobs.logprob)
        return True

    def _look_ahead(self, follower: Follower) -> bool:
        """Advances the grammar by the guesses. Returns False if it does not allow them."""
        sequence, guesses = follower.sequence, follower.guesses
        sequence.assumed = len(guesses)
        return not (sequence.guide and guesses) or sequence.guide.look_ahead(guesses) == guesses

    def _launch(self, plan: Plan, followers: dict[Sequence, Follower]) -> Round | None:
        if not plan:
            return None
        _, rounds, rows, tokens = self._launched
        single = sum(count == 1 for count in plan.values())
        self._launched = 1, rounds + 1, rows + single, tokens + sum(plan.values()) - single
        self._record.begin(list(plan))
        return Round(plan, followers, launch(self._engine, plan))

    def _settle(self, round: Round) -> dict[Sequence, Follower]:
        """Returns the requests that may have another guess. A request that the draft cannot compute
        continues without it."""
        outcomes = dict(zip(round.plan, round.step.wait(), strict=True))
        self._record.end()
        return {
            request: follower
            for request, follower in round.followers.items()
            if self._followers.get(request) is follower
            and not follower.failed
            and self._add_outcome(follower, outcomes[follower.sequence])
        }

    def _fail(self, follower: Follower) -> None:
        follower.failed = True
        follower.sequence.lease.forget()
        follower.sequence.lease.release()


def _draft_work(work: Work) -> Work:
    """The draft's work: the same sampling, with log probabilities of what it draws."""
    return replace(
        work,
        logprobs=0,
        prompt_logprobs=None,
        grammar="",
        adapter=None,
        pooling=None,
        retain_seconds=0,
    )
