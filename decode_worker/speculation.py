"""How many tokens of each sequence a step guesses: as many as are predicted to bring the most
tokens a second.

A step over r rows takes a + b * r seconds, by an online fit. A guess is one more row. It brings a
token with the chance that it and all guesses before it are right. So guesses are added, the
likeliest first, while each brings more tokens a second than the step has without it.

Guesses are what a step runs besides. Whether any was right changes how fast an answer comes, and
never what it is: a token is sampled at each position as it would be without guesses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from baton.core.online_fit import OnlineFit
from baton.engine.page_pool import PagePool
from baton.engine.prompt_lookup import Acceptance, PastAnswers, PromptLookup
from baton.engine.sequence import Sequence
from baton.engine.step import Plan
from baton.engine.token_index import LONG

MOST_GUESSES = 15
"""Of one sequence in one step."""

STEP_SECONDS, ROW_SECONDS = 1e-2, 1e-3
"""Assumed until steps have been measured; only their ratio matters."""

MEMORY = 200.0
"""Steps after which one counts for a third."""

_Chance = tuple[float, Sequence]


class Speculation:
    def __init__(self) -> None:
        self._cost = OnlineFit((STEP_SECONDS, ROW_SECONDS), MEMORY)
        self._acceptance = Acceptance()
        self._past = PastAnswers()

    def note_step(self, rows: int, seconds: float) -> None:
        self._cost.note((1, rows), seconds)

    def guess(self, plan: Plan, most_rows: int, pool: PagePool, pages: int) -> None:
        """Sets the guesses of the plan's sequences: at most `most_rows`, with at most `pages` new
        pages."""
        decoding = [each for each in plan if each.uncomputed == 1 and not each.expected]
        offers = {each: self._offered(each) for each in decoding}
        chances = [
            (chance, each)
            for each, guesses in offers.items()
            if guesses and each.lookup
            for chance in each.lookup.chances(len(guesses))
        ]
        depths = self._depths(chances, sum(plan.values()), len(decoding), most_rows)
        for sequence, depth in depths.items():
            free = pool.free
            sequence.guesses = covered(sequence, offers[sequence][:depth], pool, pages)
            pages -= free - pool.free
            if sequence.guide and sequence.guesses:
                sequence.guesses = sequence.guide.look_ahead(sequence.guesses)

    def keep(self, sequence: Sequence) -> None:
        """Lets later requests of its tenant guess from its answer."""
        if sequence.lookup:
            answer = max(0, sequence.prompt_length - LONG)
            self._past.add(sequence.work.cache_salt, sequence.tokens[answer:])

    def _offered(self, sequence: Sequence) -> list[int]:
        """The next tokens as far as they are guessed, and may come: none behind the last that
        max_tokens allows, and none from a stop token on."""
        if sequence.lookup is None:
            work, past = sequence.work, self._past.of(sequence.work.cache_salt)
            sequence.lookup = PromptLookup(
                sequence.tokens, sequence.prompt_length, work.prediction, past, self._acceptance
            )
        sequence.lookup.follow()
        left = sequence.work.max_tokens - sequence.generated - 1
        guesses = sequence.lookup.guess(min(left, MOST_GUESSES))
        ends = (at for at, guess in enumerate(guesses) if guess in sequence.work.stop_token_ids)
        return guesses[: next(ends, len(guesses))]

    def _depths(
        self, chances: Iterable[_Chance], rows: int, tokens: float, most: int
    ) -> Counter[Sequence]:
        """How many guesses of each sequence pay, where the step has `rows` rows without them and
        brings `tokens`."""
        step, row = self._cost.coefficients
        seconds = step + row * rows
        depths: Counter[Sequence] = Counter()
        for chance, sequence in sorted(chances, key=lambda each: -each[0])[:most]:
            if chance * seconds <= tokens * row:
                break
            depths[sequence] += 1
            tokens += chance
            seconds += row
        return depths


def covered(sequence: Sequence, guesses: list[int], pool: PagePool, pages: int) -> list[int]:
    """The guesses for which the lease has pages, or gets some of `pages` new ones."""
    computed = sequence.computed + 1
    places = pool.pages_for(computed + len(guesses))
    if 0 < sequence.lease.missing(places) <= pages:
        sequence.lease.cover(places)
    return guesses[: max(0, len(sequence.lease) * pool.page_size - computed)]
