"""An engine whose tokens show whether its pages are right.

A cell of a page holds a fingerprint of (token, position). The next token is
computed from the fingerprints that the sequence's pages hold at that moment, as far as
the windows of the layers reach, so one page that is missing, stale or damaged gives a
wrong answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from baton.core.errors import Internal
from baton.core.page_reach import Window
from baton.core.types import DeviceEvent, FinishReason, Work
from baton.decode_worker.speculation import Speculation, covered
from baton.engine.page_groups import make_pool
from baton.engine.page_pool import Lease, PagePool
from baton.engine.sequence import Sequence
from baton.engine.step import (
    Drawn,
    FinishedStep,
    InFlightStep,
    Outcome,
    Plan,
    check_guesses,
)

from .world import Violation

VOCABULARY = 97
_PRIME = (1 << 61) - 1

Windows = tuple[Window, ...]
"""Of the slices of the layers."""


@dataclass(frozen=True, slots=True)
class SimulatedArchitecture:
    vocabulary_size: int = VOCABULARY


class DeviceLost(RuntimeError):
    """The engine's process cannot go on."""


class SimulatedEngine:
    """Stands in for engine.Engine where a role uses it.

    One that runs ahead, as a GPU does, reads and writes pages only when its
    step is waited for, after those before it, and knows the tokens of steps
    under way by itself.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        salt: int,
        *,
        runs_ahead: bool = False,
        windows: Windows = (None,),
    ) -> None:
        self.pool = make_pool(pages, page_size, windows)
        self.adapters = None
        self.architecture = SimulatedArchitecture()
        self.context_length = self.pool.longest_context(1 << 20)
        self._windows = windows
        self.runs_ahead = runs_ahead
        self.has_independent_rows = False  # it checks no guesses
        # Memory is never clean: what a page held before looks like anything else.
        self.memory = [[salt + page] * page_size for page in range(pages)]
        self._last_tokens: dict[Lease, int] = {}
        self._under_way: deque[_Flight] = deque()
        # By request: the position that it cannot be computed at.
        self.breaks_at: dict[str, int] = {}
        # The position at which it crashes the process.
        self.crashes_at: dict[str, int] = {}

    def guide(self, work: Work) -> None:
        """No request here has a grammar."""

    def launch(self, plan: Plan) -> InFlightStep:
        for sequence, count in plan.items():
            self._check(sequence, count)
        runs = [_Run(sequence, count) for sequence, count in plan.items()]
        if not self.runs_ahead:
            return FinishedStep([self.run(run) for run in runs])
        self._under_way.append(_Flight(self, runs))
        return self._under_way[-1]

    def run_until(self, flight: _Flight) -> None:
        while not flight.outcomes:
            self._under_way.popleft().run()

    def _check(self, sequence: Sequence, count: int) -> None:
        name = sequence.work.key.request_id
        step = range(sequence.computed, sequence.computed + count)
        if self.crashes_at.get(name, self.context_length) in step:
            raise DeviceLost(f"{name} crashes the device")
        if self.breaks_at.get(name, self.context_length) in step:
            raise Internal("the logits are not numbers")

    def run(self, run: _Run) -> Outcome:
        for position in range(run.start, run.end + len(run.guesses)):
            known = run.tokens[position] if position < len(run.tokens) else None
            token = self._last_tokens[run.lease] if known is None else known
            for number, table in enumerate(run.lease.tables):
                self._check_write(table[position // self.pool.page_size])
                page, place = self._find(table, position)
                page[place] = fingerprint(token, position, number)
        if not run.samples:
            return None
        ends = range(run.end, run.end + len(run.guesses) + 1)
        drawn: list[Drawn] = [self._sample(run.lease, end) for end in ends]
        if not run.guesses:
            return drawn[0]
        checked = check_guesses(run.guesses, drawn)
        run.sequence.computed += len(checked.drawn) - 1
        return checked

    def _sample(self, lease: Lease, end: int) -> int:
        found = [
            self._find(table, position)
            for table, window in zip(lease.tables, self._windows, strict=True)
            for position in visible(window, end)
        ]
        token = next_token(page[place] for page, place in found)
        self._last_tokens[lease] = token
        return token

    def _check_write(self, page: int) -> None:
        if page in self.pool.cache.known_pages or self.pool._holders[page] != 1:
            raise Violation(f"a step writes into page {page}, which others may read")

    def _find(self, table: list[int], position: int) -> tuple[list[int], int]:
        page = table[position // self.pool.page_size]
        if page < 0:
            raise Violation(f"a step uses position {position}, whose page was given back")
        return self.memory[page], position % self.pool.page_size


class _Run:
    """A sequence as it was when its step was launched."""

    def __init__(self, sequence: Sequence, count: int) -> None:
        self.sequence = sequence
        self.lease = sequence.lease
        self.samples = sequence.samples(count)
        self.guesses = sequence.take_guesses() if self.samples else []
        self.tokens = sequence.tokens + self.guesses
        self.start = sequence.computed
        self.end = sequence.computed + count
        sequence.computed = self.end


class _Flight:
    """Its own end: the moment has passed once it has run."""

    def __init__(self, engine: SimulatedEngine, runs: list[_Run]) -> None:
        self.outcomes: list[Outcome] = []
        self._engine = engine
        self._runs = runs
        for run in runs:
            run.lease.pin()
            run.sequence.expected += run.samples

    @property
    def ended(self) -> DeviceEvent:
        return self

    def query(self) -> bool:
        return bool(self.outcomes)

    def run(self) -> None:
        self.outcomes = [self._engine.run(run) for run in self._runs]

    def wait(self) -> list[Outcome]:
        self._engine.run_until(self)
        for run in self._runs:
            run.sequence.expected -= run.samples
            run.lease.unpin()
        return self.outcomes


def visible(window: Window, end: int) -> range:
    """The positions that the last of `end` tokens sees."""
    return range(0 if window is None else max(0, end - window), end)


def fingerprint(token: int, position: int, number: int) -> int:
    """Of a token, as slice `number` of the layers holds it."""
    return (token * 1_000_003 + position * 7_919 + number * 104_729 + 1) * 2_654_435_761 % _PRIME


def next_token(cells: Iterable[int]) -> int:
    mixed = 17
    for cell in cells:
        mixed = (mixed * 31 + cell) % _PRIME
    return mixed % VOCABULARY


def following(tokens: list[int], windows: Windows) -> int:
    """The token that comes next if all pages are right."""
    return next_token(
        fingerprint(tokens[position], position, number)
        for number, window in enumerate(windows)
        for position in visible(window, len(tokens))
    )


class SimulatedSpeculation(Speculation):
    """Guesses up to three tokens, of which some are wrong."""

    def __init__(self, windows: Windows) -> None:
        super().__init__()
        self._windows = windows

    def guess(self, plan: Plan, most_rows: int, pool: PagePool, pages: int) -> None:
        for sequence in plan:
            if sequence.uncomputed > 1:
                continue
            draw = Random(hash(tuple(sequence.tokens)))
            left = sequence.work.max_tokens - sequence.generated - 1
            guesses: list[int] = []
            for _ in range(min(draw.randrange(4), most_rows, left)):
                token = following(sequence.tokens + guesses, self._windows)
                guesses.append(token if draw.random() < 0.7 else draw.randrange(VOCABULARY))
            if not sequence.work.stop_token_ids.intersection(guesses):
                free = pool.free
                sequence.guesses = covered(sequence, guesses, pool, pages)
                pages -= free - pool.free
                most_rows -= len(sequence.guesses)


def reference(work: Work, windows: Windows = (None,)) -> list[int]:
    """The answer that an undisturbed run gives."""
    tokens = list(work.prompt_tokens)
    answer: list[int] = []
    finish: FinishReason | None = None
    while finish is None:
        token = following(tokens, windows)
        tokens.append(token)
        answer.append(token)
        finish = work.finish_reason(token, len(answer))
    return answer
