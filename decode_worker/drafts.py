"""Guesses of a draft model: a smaller one of the same vocabulary, which runs ahead of requests.

    a request decodes ─▶ reading ─▶ ready ─▶ rounds before each step ─▶ dropped with its pages
                            ▲         │                                    ▲
                            └─────────┘ behind by many tokens              │
                            └─────────┴── no page left, preempted, ended ──┘

The draft has pages of its own. It computes prompts by itself, so nothing of it is transferred, and
what is dropped is computed again, as far as its prefix cache does not have it.

A round runs one token of each request and draws the next as the request itself would: with its
sampling, its grammar, and the noise of its seed and the position. So drawn tokens are guessed as
well as the best ones. A round is run while it is predicted to bring more tokens a second than the
step has without it, by the fitted cost of both models and the share of guesses that were right. How
likely the draft itself finds a guess says most about that.

What is not predicted to pay, such as a prompt of which nothing is known yet, is paid for out of an
account: it has what guesses have saved, and a small share of all time.

On a GPU, where steps run ahead, the draft guesses behind tokens that the host must know. What a
step that waits for them brings is predicted by the share of right guesses alone, and paid for by
the same rules.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

from baton.core.errors import BatonError
from baton.core.online_fit import OnlineFit
from baton.core.types import Work
from baton.decode_worker.draft_follower import ANY, ANY_SHARE, KINDS, Follower
from baton.engine.acceptance import Acceptance
from baton.engine.draft_model import MOST_BEHIND
from baton.engine.engine import Engine
from baton.engine.page_pool import PagePool
from baton.engine.sequence import Sequence
from baton.engine.step import Drawn, InFlightStep, Outcome, Plan, token_and_logprobs
from baton.worker.step_pipeline import launch
from baton.worker.step_record import StepRecord

CPU_SECONDS, GPU_SECONDS = (3e-3, 3e-4, 2e-4), (1e-3, 1e-5, 5e-6)
"""Assumed until the draft's steps have been measured: a step, a row, a token of a longer chunk."""
MEMORY = 200.0

ROOM = 1.5
"""A request is followed where there is room for so many times its tokens. So a prompt is not
computed again and again in a full pool: its request has grown by half when it must give way."""

MOST_SAVED = 0.5
"""The share of an answer's time that guesses may save: a prompt that takes longer is not read."""

TRIAL_SHARE = 0.02
FIRST_CREDIT, MOST_CREDIT, MOST_DEBT = 0.05, 2.0, 10.0
"""The share of time, and the seconds, that what does not pay may take."""


class Pace(NamedTuple):
    """Of a step without the draft's guesses."""

    tokens: float
    seconds: float
    row: float  # seconds of one row more


class Offer(NamedTuple):
    """Guesses of a request, and for each the chance that it and all before it are right."""

    guesses: list[int]
    chances: list[float]


class Round(NamedTuple):
    """A step of the draft in flight."""

    plan: Plan
    followers: dict[Sequence, Follower]  # by request
    step: InFlightStep
    began: float


class Drafts:
    """`vocabulary` is the size of the main model's, which may be padded otherwise."""

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
        self._cost = cost or OnlineFit(assumed, MEMORY)
        self._seen = Acceptance([*(share for _, share in KINDS), ANY_SHARE])
        self._followers: dict[Sequence, Follower] = {}
        self._account = FIRST_CREDIT
        self._wait = 0.0  # seconds of a wait that is still to be paid
        self._settled_at = 0.0  # when its last step had ended
        self._token_seconds = 0.0  # what a right guess saves
        self.seconds = 0.0  # that it took
        self.compared = self.right = 0  # guesses, run by the main model or not

    def earn(self, seconds: float) -> None:
        """A step of the main model took `seconds`."""
        self._pay(TRIAL_SHARE * seconds)

    def drop(self, request: Sequence) -> None:
        """Compares its last guesses, and gives its pages back."""
        follower = self._followers.pop(request, None)
        if follower and not follower.failed:
            self._follow(follower, request.tokens)
            follower.sequence.lease.release()

    def check(self) -> str:
        """Empty while no page is lost. To be asked when there are no requests."""
        return self._pool.check_integrity(held=0)

    def share(self, request: Sequence) -> float:
        """The chance that a first guess is right."""
        follower = self._followers.get(request)
        return (follower.acceptance if follower else self._seen).share(ANY)

    def waits(self, wanted: dict[Sequence, int], pace: Pace, wait: float) -> bool:
        """Whether a device should wait so many seconds for the tokens in flight, for guesses behind
        these: where that is predicted to pay, or to be tried. Pays for the wait."""
        self._token_seconds = pace.seconds / max(pace.tokens, 1.0)
        asking = {request: depth for request, depth in wanted.items() if depth > 0}
        ready = {each: self._followers[each] for each in asking if self._goes_on(each)}
        behind = (follower.missed(request) for request, follower in ready.items())
        unread = sum(tokens for tokens in behind if tokens > MOST_BEHIND)
        price = wait + (self._cost.predict((1, 0, unread)) if unread else 0.0)
        reached = self._reach({request: asking[request] for request in ready}, pace)
        pays = reached.tokens * pace.seconds > pace.tokens * (reached.seconds + price)
        if not pays and (self._account <= 0.0 or not (ready or self._begins_any(asking, pace))):
            return False
        self._pay_wait(wait)
        return True

    def _pay_wait(self, next_wait: float = 0.0) -> None:
        """Pays for the last one. It is due once the draft has guessed: a prompt is read while the
        account has seconds."""
        self._pay(-self._wait)
        self._wait = next_wait

    def _reach(self, depths: dict[Sequence, int], pace: Pace) -> Pace:
        """The pace with as many rounds as are predicted to pay, before any guess is made."""
        shares = {request: self.share(request) for request in depths}
        chances = dict(shares)
        for depth in range(1, max(depths.values(), default=0) + 1):
            chosen, pace = self.worth(chances, pace)
            chances = {
                each: chances[each] * shares[each] for each in chosen if depths[each] > depth
            }
            if not chances:
                break
        return pace

    def _goes_on(self, request: Sequence) -> bool:
        """Whether the draft follows it and can compute another token."""
        follower = self._followers.get(request)
        short = len(request.tokens) + request.expected < self._engine.context_length
        return follower is not None and not follower.failed and short

    def _begins_any(self, asking: dict[Sequence, int], pace: Pace) -> bool:
        if self._followers and not self._pays(len(asking), pace):
            return False
        return any(map(self._may_begin, asking.keys() - self._followers.keys()))

    def offer(self, wanted: dict[Sequence, int], pace: Pace, most: int) -> dict[Sequence, Offer]:
        """Guesses for requests that decode: of each at most as many as it wants, and `most` in
        all."""
        began = time.monotonic()
        self._token_seconds = pace.seconds / max(pace.tokens, 1.0)
        for request in wanted:
            if (follower := self._followers.get(request)) and not follower.failed:
                self._follow(follower, request.tokens)
        self._read([request for request, depth in wanted.items() if depth > 0], pace)
        ready = {}
        for request, depth in wanted.items():
            follower = self._followers.get(request)
            if follower and not follower.failed and follower.behind <= MOST_BEHIND and depth > 0:
                follower.most, ready[request] = depth, follower
        self._guess(ready, pace, most)
        self._pay_wait()
        self.seconds += time.monotonic() - began
        return {
            request: Offer(each.guesses, each.chances)
            for request, each in ready.items()
            if each.kinds
        }

    def _follow(self, follower: Follower, tokens: list[int]) -> None:
        guessed, came = len(follower.kinds), len(tokens) - follower.known
        right = follower.follow(tokens)
        self.compared += min(guessed, came, right + 1)
        self.right += right
        self._pay(self._token_seconds * right)

    def _read(self, requests: list[Sequence], pace: Pace) -> None:
        """Computes a chunk of tokens that the draft has not seen, of the oldest requests first."""
        began, budget, plan, readers = time.monotonic(), self._chunk_tokens, Plan(), {}
        owed, pays = 0.0, self._pays(len(requests), pace)
        for request in requests:
            follower = self._followers.get(request)
            if not follower and (pays or not self._followers) and owed <= self._account:
                follower = self._begin(request)
                owed += self._cost.coefficients[2] * (follower.behind if follower else 0)
            if not follower or follower.failed or budget <= 0:
                continue
            if follower.behind <= MOST_BEHIND:
                continue  # catches up in its next round
            sequence = follower.sequence
            count = sequence.cover(min(budget, sequence.uncomputed - 1), self._pool)
            if not count:
                self.drop(request)
                continue
            plan[sequence], readers[request] = count, follower
            budget -= count
        if reading := self._launch(plan, readers, began):
            self._settle(reading)

    def _pays(self, requests: int, pace: Pace) -> bool:
        """Whether a round of so many requests would. Otherwise one is tried at a time."""
        step, row, _ = self._cost.coefficients
        gained = requests * self._seen.share(ANY)
        return gained * pace.seconds > pace.tokens * (step + requests * (row + pace.row))

    def _may_begin(self, request: Sequence) -> bool:
        """Whether there is room, and seconds on the account, and the draft can compute it."""
        tokens, work = request.tokens, request.work
        room = self._pool.pages_for(int(ROOM * len(tokens)) + 1) * self._pool.slices
        if self._account < 0.0 or work.alone or room > self._pool.free:
            return False
        left = self._token_seconds * (work.max_tokens - request.generated)
        if self._cost.coefficients[2] * len(tokens) > MOST_SAVED * left:
            return False
        return len(tokens) < self._engine.context_length and max(tokens) < self._vocabulary

    def _begin(self, request: Sequence) -> Follower | None:
        """Starts to follow a request."""
        if not self._may_begin(request):
            return None
        tokens, work = request.tokens, request.work
        chain = self._pool.chain(work.cache_salt)
        keys = chain.to_find(tokens)
        lease = self._pool.acquire(self._pool.pages_for(len(tokens)), keys)
        sequence = Sequence(_draft_work(work), lease, list(tokens), chain=chain)
        sequence.computed = sequence.cached_tokens
        sequence.guide = request.guide
        follower = Follower(sequence, self._seen.of_sequence(), len(tokens))
        self._followers[request] = follower
        return follower

    def _guess(self, ready: dict[Sequence, Follower], pace: Pace, most: int) -> None:
        """Rounds, as long as they pay; else at most one, if the account has seconds for it. Where
        steps run ahead, so do rounds, by one."""
        going, flying = ready, None
        while True:
            chosen, pace = self._choose(going, ready, pace)
            launched = self._launch_round({each: going[each] for each in chosen[:most]})
            going = dict(launched.followers) if launched else {}
            if flying:
                alive = self._settle(flying)
                going = {request: going[request] for request in going if request in alive}
            if not launched:
                return
            most -= len(launched.plan)
            self._pay(-pace.row * len(launched.plan))
            flying = launched._replace(followers=going)
            if not self._runs_ahead(going):
                going, flying = self._settle(flying), None

    def _choose(
        self, going: dict[Sequence, Follower], ready: dict[Sequence, Follower], pace: Pace
    ) -> tuple[list[Sequence], Pace]:
        """The requests of the next round, and the pace with it."""
        chances = {request: each.chance for request, each in going.items() if self._fits(each)}
        chosen, pace = self.worth(chances, pace)
        tried = any(each.kinds or each.sequence.expected for each in ready.values())
        if chances and not chosen and not tried and self._account > 0.0:
            chosen = [max(chances, key=chances.__getitem__)]
        return chosen, pace

    def _runs_ahead(self, going: dict[Sequence, Follower]) -> bool:
        """Whether a round may be launched before the guesses of the last are known."""
        known = any(each.sequence.sampled_by_tokens for each in going.values())
        return self._engine.runs_ahead and not known

    def worth(self, chances: dict[Sequence, float], pace: Pace) -> tuple[list[Sequence], Pace]:
        """The requests, the likeliest first, of which another guess pays; and the pace with
        these."""
        step, row, _ = self._cost.coefficients
        price, gained, chosen = step, 0.0, []
        for request, chance in sorted(chances.items(), key=lambda each: -each[1]):
            if chance * pace.seconds <= pace.tokens * (row + pace.row):
                break
            chosen.append(request)
            price, gained = price + row + pace.row, gained + chance
        if gained * pace.seconds <= pace.tokens * price:
            return [], pace
        return chosen, Pace(pace.tokens + gained, pace.seconds + price, pace.row)

    def _fits(self, follower: Follower) -> bool:
        """Whether it wants another guess, and the draft can compute it."""
        sequence = follower.sequence
        short = len(follower.kinds) + sequence.expected < follower.most
        return short and len(sequence.tokens) + sequence.expected < self._engine.context_length

    def _launch_round(self, going: dict[Sequence, Follower]) -> Round | None:
        """Adds a guess to each."""
        began, plan, followers = time.monotonic(), Plan(), {}
        for request, follower in going.items():
            sequence = follower.sequence
            if not self._look_ahead(follower):
                continue
            if sequence.cover(sequence.uncomputed, self._pool) < sequence.uncomputed:
                self.drop(request)
                continue
            plan[sequence], followers[request] = sequence.uncomputed, follower
        return self._launch(plan, followers, began)

    def _take(self, follower: Follower, outcome: Outcome) -> bool:
        """Whether it was guessed: nothing is from a stop token on, or from one that the main model
        does not have."""
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
        """Has the grammar follow the guesses. Whether it could."""
        sequence, guesses = follower.sequence, follower.guesses
        sequence.assumed = len(guesses)
        return not (sequence.guide and guesses) or sequence.guide.look_ahead(guesses) == guesses

    def _launch(
        self, plan: Plan, followers: dict[Sequence, Follower], began: float
    ) -> Round | None:
        if not plan:
            return None
        self._record.begin(list(plan))
        return Round(plan, followers, launch(self._engine, plan), began)

    def _settle(self, round: Round) -> dict[Sequence, Follower]:
        """Returns the requests behind whose guess another may come. One that the draft fails at
        goes on without it."""
        outcomes = dict(zip(round.plan, round.step.wait(), strict=True))
        self._record.end()
        began, self._settled_at = max(round.began, self._settled_at), time.monotonic()
        single = sum(count == 1 for count in round.plan.values())
        features = (1, single, sum(round.plan.values()) - single)
        self._cost.note(features, self._settled_at - began)
        self._pay(-self._cost.predict(features))
        return {
            request: follower
            for request, follower in round.followers.items()
            if self._followers.get(request) is follower
            and not follower.failed
            and self._take(follower, outcomes[follower.sequence])
        }

    def _fail(self, follower: Follower) -> None:
        follower.failed = True
        follower.sequence.lease.forget()
        follower.sequence.lease.release()

    def _pay(self, seconds: float) -> None:
        self._account = min(max(self._account + seconds, -MOST_DEBT), MOST_CREDIT)


def _draft_work(work: Work) -> Work:
    """What the draft draws with: the same sampling, and log probabilities of what it draws."""
    return replace(
        work,
        logprobs=0,
        prompt_logprobs=None,
        grammar="",
        adapter=None,
        pooling=None,
        retain_seconds=0,
    )
