"""Chooses how many tokens of each sequence a step guesses, for the most tokens per second.

The cost of a step by its number of rows is measured (decode_worker/step_cost.py). A guess is one
more row. It yields a token with the probability that it and all guesses before it are right.
Guesses are added, likeliest first, up to the number of rows with the most tokens per second. On a
CPU, which computes rows in blocks, that is the end of a block. Now and then a step runs without
guesses, or with some that do not seem to pay, to measure both costs. A draft model, if there is one
(decode_worker/drafts.py), guesses for sequences whose text offers no likelier guess.

On a GPU the host plans a step while the one before runs, and so does not know its tokens. A step
with guesses needs them, so the device waits for its plan; the fit includes this wait. Steps run
ahead until guesses are predicted to gain more than the wait costs.

Guesses change how fast an answer comes, never its tokens: a token is sampled at each position as it
would be without guesses.
"""

from __future__ import annotations

from collections import Counter
from operator import itemgetter

from baton.decode_worker.draft_pricing import Pace
from baton.decode_worker.drafts import Drafts
from baton.decode_worker.step_cost import StepCost
from baton.engine.acceptance import Offer
from baton.engine.page_pool import PagePool
from baton.engine.prompt_lookup import PastAnswers, PromptLookup, new_acceptance
from baton.engine.sequence import Sequence
from baton.engine.step import Plan
from baton.engine.token_index import LONG

MOST_GUESSES = 15
"""Guesses of one sequence in one step."""

FIRST_PERIOD, PERIOD = 2, 32
"""Steps with guesses before one runs without, at first and later."""

TRIAL_PERIOD, TRIAL_ROWS, TRIAL_CHANCE = 64, 2, 0.5
"""After TRIAL_PERIOD steps without guesses, up to TRIAL_ROWS guesses of at least TRIAL_CHANCE are
tried, or as many as fill a block: the last measurement may be of a busy moment."""

MOST_FOLLOWED = 64
"""If steps run ahead, a step with more sequences has no guesses: the host takes 10 to 20 us for
each, which would be longer than the step."""

_Chance = tuple[float, Sequence]


class Speculation:
    def __init__(
        self,
        drafts: Drafts | None = None,
        cost: StepCost | None = None,
        *,
        runs_ahead: bool = False,
    ) -> None:
        """`runs_ahead`: steps are planned while the one before runs."""
        self._drafts = drafts
        self._runs_ahead = runs_ahead
        self._cost = cost or StepCost(runs_ahead=runs_ahead)
        self._acceptance = new_acceptance()
        self._past = PastAnswers()
        self._drafted = drafts.seconds if drafts else 0.0  # as of the last step
        self._steps_with_guesses = 0  # since one without
        self._steps_without = 0  # since one with guesses
        self._period = FIRST_PERIOD
        self._plain_steps = 0  # steps without guesses that are due

    def note_step(self, rows: int, seconds: float, waited: bool = False) -> None:
        if self._drafts:
            drafted, self._drafted = self._drafts.seconds - self._drafted, self._drafts.seconds
            seconds -= drafted if waited else 0.0  # the device did not wait meanwhile
        self._cost.note(rows, seconds, waited=waited and self._runs_ahead)
        if self._drafts:
            self._drafts.pricing.earn(self._cost.seconds(rows))

    def waits(self, plan: Plan, most_rows: int) -> bool:
        """True if a step with guesses is predicted to gain more than one that is launched at once:
        guesses need the tokens of the step in flight."""
        if len(plan) > MOST_FOLLOWED or not any(each.expected for each in plan):
            return False
        if self._runs_without():
            return False
        decoding = [each for each in plan if each.uncomputed == 1]
        offers = {each: self._ahead(each) for each in decoding}
        rows = sum(plan.values())
        if self._depths(_chances(offers), decoding, rows, most_rows):
            return True
        return self._drafts is not None and self._waits_for_drafts(self._drafts, offers, rows)

    def _waits_for_drafts(self, drafts: Drafts, offers: dict[Sequence, Offer], rows: int) -> bool:
        if not offers:
            return False
        return drafts.waits(_wanted(drafts, offers), self._pace(len(offers), rows))

    def _runs_without(self) -> bool:
        """True if a step without guesses is due, to measure its cost."""
        if self._steps_with_guesses >= self._period:
            self._steps_with_guesses, self._period = 0, min(2 * self._period, PERIOD)
            self._plain_steps = 2 if self._runs_ahead else 1  # the device waits for the first
        self._plain_steps = max(self._plain_steps, 0) - 1
        return self._plain_steps >= 0

    def _trial(self, chances: list[_Chance], rows: int, most: int) -> Counter[Sequence]:
        """A few likely guesses, if a step with guesses is due, to measure its cost."""
        if self._steps_without < TRIAL_PERIOD:
            return Counter()
        block = self._cost.block
        tried = max(TRIAL_ROWS, -rows % block or block) if rows >= block > 1 else TRIAL_ROWS
        ordered = sorted(chances, key=itemgetter(0), reverse=True)[: min(tried, most)]
        likely = [sequence for chance, sequence in ordered if chance >= TRIAL_CHANCE]
        # A part of a block cannot pay, and its number of rows would be recorded for nothing.
        return Counter(likely) if len(likely) == tried or tried == TRIAL_ROWS else Counter()

    def _ahead(self, sequence: Sequence) -> Offer:
        """Guesses after the tokens in flight, which are guessed too."""
        guesses, chances = self._found(sequence)
        return Offer(guesses[sequence.expected :], chances[sequence.expected :])

    def guess(self, plan: Plan, most_rows: int, pool: PagePool, pages: int) -> None:
        """Sets the guesses of the plan's sequences: at most `most_rows`, with at most `pages` new
        pages."""
        if self._runs_ahead and len(plan) > MOST_FOLLOWED:
            return
        if any(each.expected for each in plan):
            self._steps_with_guesses = 0
            return
        decoding = [each for each in plan if each.uncomputed == 1]
        if not decoding or self._runs_without():
            return
        offers, rows = {each: self._found(each) for each in decoding}, sum(plan.values())
        if self._drafts:
            self._add_drafts(self._drafts, offers, rows, most_rows)
        chances = _chances(offers)
        depths = self._depths(chances, decoding, rows, most_rows)
        depths = depths or self._trial(chances, rows, most_rows)
        self._steps_with_guesses = self._steps_with_guesses + 1 if depths else 0
        self._steps_without = 0 if depths else self._steps_without + 1
        for sequence, depth in depths.items():
            free = pool.free
            sequence.guesses = covered(sequence, offers[sequence].guesses[:depth], pool, pages)
            pages -= free - pool.free
            if sequence.guide and sequence.guesses:
                sequence.guesses = sequence.guide.look_ahead(sequence.guesses)
            if self._drafts:
                self._drafts.note_run(sequence, len(sequence.guesses))

    def drop(self, sequence: Sequence) -> None:
        """Called when the sequence loses its pages: drops those of the draft too."""
        if self._drafts:
            self._drafts.drop(sequence)

    def end(self, sequence: Sequence) -> None:
        """Ends a sequence. Later requests of its tenant guess from its answer too."""
        self.drop(sequence)
        if sequence.lookup:
            answer = max(0, sequence.prompt_length - LONG)
            self._past.add(sequence.work.cache_salt, sequence.tokens[answer:])

    def _add_drafts(
        self, drafts: Drafts, offers: dict[Sequence, Offer], rows: int, most: int
    ) -> None:
        """Replaces guesses from the text by the draft's where these are likelier."""
        pace, most = self._pace(len(offers), rows), min(most, self._cost.most_rows(rows) - rows)
        offers.update(drafts.offer(_wanted(drafts, offers), pace, most))

    def _pace(self, tokens: int, rows: int) -> Pace:
        seconds = self._cost.seconds(rows)
        wait = self._cost.seconds(rows, waited=self._runs_ahead) - seconds
        return Pace(tokens, seconds, (self._cost.seconds(2 * rows) - seconds) / rows, wait)

    def _found(self, sequence: Sequence) -> Offer:
        """Guesses from the text: none for the last token that max_tokens allows or after it, and
        none from a stop token on."""
        if sequence.lookup is None:
            work, past = sequence.work, self._past.of(sequence.work.cache_salt)
            sequence.lookup = PromptLookup(
                sequence.tokens, sequence.prompt_length, work.prediction, past, self._acceptance
            )
        sequence.lookup.follow()
        return sequence.lookup.offer(most_guesses(sequence), sequence.work.stop_token_ids)

    def _depths(
        self, chances: list[_Chance], decoding: list[Sequence], rows: int, most: int
    ) -> Counter[Sequence]:
        """Returns how many guesses of each sequence pay. Without guesses the step has `rows` rows
        and yields a token for each sequence in `decoding`."""
        if not chances:
            return Counter()
        cost, most = self._cost, min(most, self._cost.most_rows(rows) - rows)
        waits = self._runs_ahead and not all(each.needs_known_tokens for each in decoding)
        tokens, paying = float(len(decoding)), 0
        best, last = tokens / cost.seconds(rows), tokens / cost.seconds(rows, waited=waits)
        likely = sorted(chances, key=itemgetter(0), reverse=True)[:most]
        for count, (chance, _) in enumerate(likely, start=1):
            tokens += chance
            if cost.is_full(rows + count) or count == len(likely):
                rate = tokens / cost.seconds(rows + count, waited=waits)
                if rate <= last and cost.block == 1:  # further guesses pay even less
                    break
                last = rate
                if rate > best:
                    best, paying = rate, count
        return Counter(sequence for _, sequence in likely[:paying])


def _chances(offers: dict[Sequence, Offer]) -> list[_Chance]:
    return [(chance, each) for each, offer in offers.items() for chance in offer.chances]


def _wanted(drafts: Drafts, offers: dict[Sequence, Offer]) -> dict[Sequence, int]:
    """Returns how many guesses of the draft each may have: none if its text has a likelier one."""
    return {
        each: most_guesses(each) - each.expected
        if drafts.share(each) > next(iter(offer.chances), 0.0)
        else 0
        for each, offer in offers.items()
    }


def most_guesses(sequence: Sequence) -> int:
    """Never guesses the last token that max_tokens allows."""
    return min(sequence.work.max_tokens - sequence.generated - 1, MOST_GUESSES)


def covered(sequence: Sequence, guesses: list[int], pool: PagePool, pages: int) -> list[int]:
    """Returns the guesses that fit into the lease, which may grow by up to `pages` pages."""
    computed = sequence.computed + 1
    needed = pool.pages_for(computed + len(guesses))
    if 0 < sequence.lease.missing(needed) <= pages:
        sequence.lease.cover(needed)
    return guesses[: max(0, len(sequence.lease) * pool.page_size - computed)]
