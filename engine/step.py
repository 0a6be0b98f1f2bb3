"""One step over many sequences: its plan, the model's inputs, and its outcome."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from baton.core.errors import BatonError, Internal
from baton.core.types import DeviceEvent, Logprobs
from baton.engine.sequence import Sequence

Plan = dict[Sequence, int]
"""One step: how many tokens of each sequence to run, from tokens[computed] on, all in one
forward pass. The lease's pages must cover them. Where they end with the sequence's last token,
the step samples the next one."""


def check_plan(plan: Plan, page_size: int) -> None:
    """Raises Internal where there is nothing to run, or no page for it."""
    for sequence, count in plan.items():
        if not 0 < count <= sequence.uncomputed:
            raise Internal(f"a chunk of {count} of {sequence.uncomputed} tokens")
        if sequence.computed + count > len(sequence.lease) * page_size:
            raise Internal("a chunk reaches past its sequence's pages")


def in_row_order(plan: Plan) -> Plan:
    """The plan in the order of a step's rows: single tokens first, since they are attended
    together."""
    return dict(sorted(plan.items(), key=lambda chunk: chunk[1] > 1))


class Scored(NamedTuple):
    """A sampled token of a sequence that asks for log probabilities."""

    token: int
    logprobs: Logprobs


Outcome = int | Scored | BatonError | None
"""What a step did for one sequence: sampled a token, failed it, or just computed it."""


class InFlightStep(Protocol):
    """A step that has been launched and may still be running."""

    @property
    def ended(self) -> DeviceEvent | None:
        """Its end on the device; None where it had ended when its launch returned."""

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
    """What the model needs of a chunk, as plain values that can be sent to other ranks."""

    start: int  # position of the first token
    tokens: list[int]
    tables: list[list[int]]  # pages of the sequence by slice, at least up to the last token
    wanted: list[int]  # positions whose logits are needed

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def chunk_inputs(sequence: Sequence, count: int, page_size: int) -> ChunkInputs:
    start, end = sequence.computed, sequence.computed + count
    tables = [table[: -(-end // page_size)] for table in sequence.lease.tables]
    wanted = [*sequence.scored(count), *([end - 1] if sequence.samples(count) else ())]
    return ChunkInputs(start, sequence.tokens[start:end], tables, wanted)
