"""Guesses the next tokens of a sequence: what followed the same tokens before, in its prompt or
its answer, in earlier answers to the same tenant, or in the answer as the caller predicts it.

A match that goes on is followed token by token, so it grows without a search. Each token that
comes is compared with the one guessed for it, whether or not that was run. So the chance of a
guess is known without trying, by the length of its match.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from baton.engine.acceptance import Acceptance
from baton.engine.token_index import LONG, TokenIndex, last_runs

MOST_INDEXED = 1 << 14
"""Of a prompt, the last tokens that are indexed."""

MOST_KEPT, MOST_TENANTS = 1 << 13, 32
"""Tokens of a tenant's answers in one generation, of which there are two; and tenants."""

PRIORS = ((4, 0.3), (12, 0.6), (1 << 30, 0.85))
"""By the length of a match up to these: the share of right guesses that is assumed at first."""


def new_acceptance() -> Acceptance:
    """Of matches, by their length."""
    return Acceptance([share for _, share in PRIORS])


class PastAnswers:
    """What tenants were answered lately. Nobody's guesses come from another tenant's answers:
    how fast an answer comes must not say what others asked."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, list[TokenIndex]] = OrderedDict()

    def of(self, tenant: str) -> list[TokenIndex]:
        """The latest first."""
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
    """Of one sequence; `tokens` is its own list, which grows, and whose answer begins at `answer`.
    `past` are other texts."""

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
        self._text = self._own  # the one that matches
        self._place: int | None = None  # in it, of the token guessed to come next
        self._length = 0  # of the match before it
        self._advance(tokens[answer - 1])
        if predicted:
            self._text, self._place, self._length = self._own, 0, LONG
        self._known = answer
        self.follow()

    def follow(self) -> None:
        """Takes over what was added to the tokens."""
        for position in range(self._known, len(self._source)):
            token = self._source[position]
            if self._place is not None:
                self._compare(self._place, token)
            self._advance(token)
        self._known = len(self._source)

    def guess(self, most: int) -> list[int]:
        """At most `most` tokens. Where a match reaches the end, what it repeats is repeated."""
        if self._place is None or most < 1:
            return []
        found = self._text.tokens[self._place : self._place + most]
        period = len(found) if self._text is self._own else 0
        while period and len(found) < most:
            found.append(found[-period])
        return found

    def chances(self, count: int) -> Iterator[float]:
        """For each of `count` guesses, that it and all before it are right."""
        chance = 1.0
        for length in range(self._length, self._length + count):
            chance *= self._acceptance.share(_kind(length))
            yield chance

    def _compare(self, place: int, token: int) -> None:
        right = self._text.tokens[place] == token
        self._acceptance.note(_kind(self._length), right=right)
        self._place = place + 1 if right and not self._ends(self._text, place + 1) else None
        self._length += 1

    def _advance(self, token: int) -> None:
        """Looks for the runs that end with `token`, and adds them."""
        runs = last_runs(self._own.tokens, token)
        if self._place is None:
            self._search(runs)
        self._own.append(token, runs)

    def _search(self, runs: list[tuple[int, int]]) -> None:
        for size, key in runs:
            # What others said is worth a guess only after a long run.
            for text in (self._own, *(self._past if size == LONG else ())):
                place = text.find(key)
                if place is not None and not self._ends(text, place):
                    self._text, self._place, self._length = text, place, size
                    return

    def _ends(self, text: TokenIndex, place: int) -> bool:
        """Whether nothing is known to follow. What is in the sequence itself always goes on."""
        return text is not self._own and place == len(text.tokens)


def _kind(length: int) -> int:
    return next(kind for kind, (longest, _) in enumerate(PRIORS) if length < longest)
