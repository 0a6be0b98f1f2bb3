"""Guesses the next tokens of a sequence: what followed the same tokens before, in its prompt or
its answer, in earlier answers to the same tenant, or in the answer that the caller predicts.

A match is followed token by token, so it grows without a search, and continues after edits
(engine/text_match.py). A few matches are followed at once; guesses come from the one whose next
guess is the likeliest. Each new token is compared with its guess, even if no step ran that guess.
So the share of right guesses of each kind is known without trials.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable

from baton.engine.acceptance import Acceptance, Offer
from baton.engine.text_match import (
    EDITED,
    LONG_MATCH,
    MATCH,
    RESUMED,
    SHIFTED,
    SHORT_MATCH,
    Match,
)
from baton.engine.token_index import LONG, TokenIndex, last_runs

MOST_INDEXED = 1 << 14
"""A prompt's last tokens that are indexed."""

MOST_KEPT, MOST_TENANTS = 1 << 13, 32
"""Tokens of a tenant's answers in each of two generations, and the number of tenants."""

MOST_MATCHES = 3
"""Matches that are followed at once."""

PRIORS = {SHORT_MATCH: 0.3, MATCH: 0.6, LONG_MATCH: 0.85, RESUMED: 0.5, SHIFTED: 0.3, EDITED: 0.5}
"""The share of right guesses that is assumed at first, by kind."""


def new_acceptance() -> Acceptance:
    return Acceptance([PRIORS[kind] for kind in range(len(PRIORS))])


class PastAnswers:
    """Recent answers to each tenant. Guesses never come from another tenant's answers: the speed
    of an answer must not reveal what others asked."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, list[TokenIndex]] = OrderedDict()

    def of(self, tenant: str) -> list[TokenIndex]:
        """A tenant's answers, the latest generation first."""
        return self._tenants.get(tenant, [])

    def add(self, tenant: str, tokens: list[int]) -> None:
        generations = self._tenants.setdefault(tenant, [])
        self._tenants.move_to_end(tenant)
        if not generations or len(generations[0].tokens) + len(tokens) > MOST_KEPT:
            generations.insert(0, TokenIndex([]))
            del generations[2:]
        generations[0].extend(tokens[-MOST_KEPT:])
        if len(self._tenants) > MOST_TENANTS:
            self._tenants.popitem(last=False)


class PromptLookup:
    """Guesses for one sequence. `tokens` is the sequence's own list, which grows; its answer begins
    at `answer`. `past` are other texts."""

    def __init__(
        self,
        tokens: list[int],
        answer: int,
        prediction: Iterable[int] = (),
        past: list[TokenIndex] | None = None,
        seen: Acceptance | None = None,
    ) -> None:
        self._source = tokens
        predicted = list(prediction)
        self._own = TokenIndex(predicted + tokens[max(0, answer - MOST_INDEXED) : answer - 1])
        self._past = past or []
        self._acceptance = (seen or new_acceptance()).of_sequence()
        self._matches: list[Match] = []
        self._best: Match | None = None  # the one whose next guess is the likeliest
        self._advance(tokens[answer - 1])
        if predicted:
            self._best = Match(self._own, 0, LONG, self._own)
            self._matches = [self._best]
        self._known = answer
        self.follow()

    def follow(self) -> None:
        """Advances by the tokens that were added since the last call."""
        for position in range(self._known, len(self._source)):
            self._advance(self._source[position])
        self._known = len(self._source)

    def offer(self, most: int, stops: Container[int] = ()) -> Offer:
        """At most `most` guesses, none from one of `stops` on. A match that reaches the end of the
        sequence continues with its own guesses."""
        if not self._best:
            return Offer([], [])
        guesses, kinds = self._best.guesses(most, stops)
        return Offer(guesses, self._acceptance.chances(kinds))

    def _advance(self, token: int) -> None:
        """Advances the matches by `token`, searches for the runs that end with it, and indexes
        them."""
        if self._matches:
            if self._best and (guess := self._best.next_guess()) is not None:
                self._acceptance.note(self._best.kind, right=guess == token)
            self._matches = [each for each in self._matches if each.take(token)]
        runs = last_runs(self._own.tokens, token)
        self._search(runs)
        self._own.append(token, runs)
        self._choose()

    def _search(self, runs: list[tuple[int, int]]) -> None:
        for size, key in runs:
            # Other texts are worth a guess only after a long run.
            for text in (self._own, *(self._past if size == LONG else ())):
                place = text.find(key)
                if place is not None and not self._ends(text, place):
                    if not any(each.place == place and each.text is text for each in self._matches):
                        self._matches.append(Match(text, place, size, self._own))
                    return

    def _choose(self) -> None:
        if len(self._matches) > MOST_MATCHES:
            self._matches.remove(min(self._matches, key=self._rank))
        if len(self._matches) > 1:
            self._best = max(self._matches, key=self._rank)
        else:
            self._best = self._matches[0] if self._matches else None

    def _rank(self, match: Match) -> tuple[float, int]:
        return match.share(self._acceptance.share(match.kind)), match.length

    def _ends(self, text: TokenIndex, place: int) -> bool:
        """True if nothing follows in the text. In the sequence itself something always does."""
        return text is not self._own and place == len(text.tokens)
