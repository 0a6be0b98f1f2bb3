"""One step over many sequences: its plan, the model's inputs, and its outcome."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from baton.core.errors import BatonError, Internal
from baton.core.types import Adapter, DeviceEvent, Logprobs
from baton.engine.sequence import Sequence

Plan = dict[Sequence, int]
"""One step: how many tokens of each sequence to run, from tokens[computed] on, all in one
forward pass. The lease's pages must cover them. If they end with the sequence's last token, the
step samples the next one. It then runs the sequence's guesses too, which are not counted, and
samples after each."""

Drawing = dict[Sequence, list[Sequence]]
"""Sequences that sample, each as it is before each of its tokens."""


def drawing_of(plan: Plan) -> Drawing:
    """The sequences of the plan that sample, in its order."""
    return {
        sequence: [sequence.ahead(place) for place in range(sequence.draws(count))]
        for sequence, count in plan.items()
        if sequence.samples(count)
    }


def with_guesses(plan: Plan) -> Plan:
    """The number of rows of each sequence of the plan."""
    return {
        each: count + len(each.guesses) if each.guesses and each.samples(count) else count
        for each, count in plan.items()
    }


def check_plan(plan: Plan, page_size: int) -> None:
    """Raises Internal if a chunk has nothing to run, or no page for it."""
    for (sequence, count), rows in zip(plan.items(), with_guesses(plan).values(), strict=True):
        if not 0 < count <= sequence.uncomputed:
            raise Internal(f"a chunk of {count} of {sequence.uncomputed} tokens")
        if sequence.computed + rows > len(sequence.lease) * page_size:
            raise Internal("a chunk reaches past its sequence's pages")


def in_row_order(plan: Plan) -> Plan:
    """The plan in the order of a step's rows: single tokens first, since they are attended
    together, and of these the ones without guesses."""
    return dict(sorted(plan.items(), key=lambda chunk: (chunk[1] > 1, bool(chunk[0].guesses))))


class Scored(NamedTuple):
    """A sampled token of a sequence that asks for log probabilities."""

    token: int
    logprobs: Logprobs


Drawn = int | Scored
"""A sampled token."""


def token_and_logprobs(drawn: Drawn) -> tuple[int, Logprobs | None]:
    return drawn if isinstance(drawn, Scored) else (drawn, None)


class Checked(NamedTuple):
    """What a step sampled for a sequence with guesses: the right guesses, and one more token."""

    drawn: list[Drawn]
    guesses: int  # right and wrong


Outcome = Drawn | Checked | BatonError | None
"""What a step did for one sequence: sampled for it, failed it, or just computed it."""


def check_guesses(guesses: list[int], drawn: list[Drawn]) -> Checked:
    """Accepts the guesses up to the first that was not sampled in its place. `drawn` has the token
    sampled in place of each guess, and the one after the last."""
    right = 0
    for guess, each in zip(guesses, drawn, strict=False):
        if guess != token_and_logprobs(each)[0]:
            break
        right += 1
    return Checked(drawn[: right + 1], len(guesses))


def outcome_of(guesses: list[int], drawn: list[Drawn]) -> Outcome:
    """`drawn` is as in check_guesses; without guesses, one token."""
    return check_guesses(guesses, drawn) if guesses else drawn[0]


class InFlightStep(Protocol):
    """A step that has been launched and may still be running."""

    @property
    def ended(self) -> DeviceEvent | None:
        """Its end on the device; None if it had ended when its launch returned."""

    def wait(self) -> list[Outcome]:
        """Waits for the outcome of each sequence, in the plan's order. Called once.

        The caller appends the tokens before it plans another step.
        """


class FinishedStep:
    """A step that had ended when its launch returned."""

    ended: DeviceEvent | None = None

    def __init__(self, outcomes: list[Outcome]) -> None:
        self._outcomes = outcomes

    def wait(self) -> list[Outcome]:
        return self._outcomes


class ChunkInputs(NamedTuple):
    """A chunk's inputs to the model, as plain values that can be sent to other ranks."""

    start: int  # position of the first token
    tokens: list[int]
    tables: list[list[int]]  # pages of the sequence by slice, at least up to the last token
    wanted: list[int]  # positions that the last layer computes
    guesses: int = 0  # how many tokens at the end are guesses
    adapter: bytes = b""  # its digest; empty: none

    @property
    def decodes(self) -> bool:
        """True if it has one token, with its guesses: these rows are attended one by one, with
        those of other sequences."""
        return len(self.tokens) == 1 + self.guesses

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class AdapterChange(NamedTuple):
    """Sent to other ranks before the first step that needs an adapter, and after the last."""

    adapter: Adapter
    loaded: bool


def chunk_inputs(sequence: Sequence, count: int, page_size: int) -> ChunkInputs:
    start, drawn = sequence.computed, sequence.draws(count)
    guesses = sequence.guesses if drawn else []
    end = start + count + len(guesses)
    tables = [table[: -(-end // page_size)] for table in sequence.lease.tables]
    wanted = [*sequence.needed(count), *range(end - drawn, end)]
    tokens = sequence.tokens[start : start + count] + guesses
    adapter = sequence.work.adapter_digest
    return ChunkInputs(start, tokens, tables, wanted, len(guesses), adapter)
