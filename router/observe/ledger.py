"""Records where each request's time goes: marks on the router's clock, and workers' durations.

    arrived ── parsed ── ready ── placed ── first ── first_text ── first_written
                                              │
        ended ── last_text ── last ── second ─┘

Marks cut a request's time into segments; durations from workers cut a segment further
(router/observe/time_breakdown.py). So the parts always sum to the whole, and no two clocks are
compared. A ledger has a fixed size, however long the answer.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import islice

from baton.router.placement.placement import Placement, Reason
from baton.v1 import timing_pb2
from baton.v1 import worker_pb2 as pb

KEPT_REQUESTS = 1000
CACHE_HEADER = "x-baton-cache"
MAX_TRACEPARENT = 64


@dataclass(slots=True)
class AnswerLedger:
    """The ledger of one answer. Marks are of time.monotonic(), and 0 until they are set."""

    arrived: float
    parsed: float = 0.0
    ready: float = 0.0  # the prompt is tokenized
    placed: float = 0.0  # the last placement before the first token
    first: float = 0.0  # the first token
    first_text: float = 0.0
    first_written: float = 0.0
    second: float = 0.0  # the first tokens after the first
    last: float = 0.0  # the latest tokens
    last_text: float = 0.0
    ended: float = 0.0

    # Measured by the router.
    template_seconds: float = 0.0
    tokenize_seconds: float = 0.0
    text_seconds: float = 0.0  # of all tokens
    write_seconds: float = 0.0  # of all messages
    longest_gap: float = 0.0
    lost_before: float = 0.0  # in attempts that ended before the first token
    lost_after: float = 0.0  # gaps between tokens in which an attempt ended
    reserve_seconds: float = 0.0  # from the placement to the ticket
    held_seconds: float = 0.0  # the first token was held back while a hit was verified

    # Reported by workers, for the attempt that gave the first token.
    prefill_wait: float = 0.0  # includes the wait for fetched pages
    fetch_seconds: float = 0.0
    prefill_seconds: float = 0.0
    chunks: Sequence[timing_pb2.Chunk] = ()
    push_seconds: float = 0.0
    exposed_seconds: float = 0.0
    admit_seconds: float = 0.0
    first_decode_seconds: float = 0.0

    response_cache: timing_pb2.ResponseCache | None = None  # set if the answer came from it
    refused_hit: timing_pb2.RefusedHit | None = None
    placement: Placement | None = None
    attempts: int = 0
    retry_reason: str = ""  # why there was a retry, the last time
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    accepted_tokens: int = 0  # tokens that were guessed
    rejected_tokens: int = 0  # wrong guesses
    bytes: int = 0
    finished: bool = False  # the answer is complete
    _recovering: bool = False

    @property
    def queue_seconds(self) -> float:
        """Seconds in the router's queue before the first token."""
        return max(self.placed - self.ready - self.lost_before, 0.0)

    @property
    def exposed_reserve(self) -> float:
        """The part of the wait for decode's pages that was left after the first token."""
        return max(self.placed + self.reserve_seconds - self.first, 0.0)

    def prepare(self, template_seconds: float, tokenize_seconds: float, tokens: int) -> None:
        self.ready = time.monotonic()
        self.template_seconds = template_seconds
        self.tokenize_seconds = tokenize_seconds
        self.prompt_tokens = tokens

    def place(self, placement: Placement) -> None:
        """Notes the placement of an attempt."""
        self.attempts += 1
        if placement.code is Reason.RETRY:
            self.retry_reason = placement.reason
        if not self.first:
            self.placed = time.monotonic()
            self.placement = placement
            self.reserve_seconds = 0.0

    def replay(self, cache: timing_pb2.ResponseCache) -> None:
        """Resets what was measured of attempts: the answer was found in the response cache, perhaps
        after its placement and after tokens that were held back."""
        for each in fields(self):
            if each.name not in _PROMPT_FIELDS:
                setattr(self, each.name, each.default)
        self.response_cache = cache

    def lose(self) -> None:
        """Notes a failed attempt, before a retry."""
        if self.first:
            self._recovering = True
        else:
            self.lost_before += time.monotonic() - self.placed

    @property
    def _is_settled(self) -> bool:
        """True if an earlier attempt gave the first token: later ones change no durations."""
        return self.attempts > 1 and self.first > 0.0

    def note_reserved(self) -> None:
        if not self._is_settled:
            self.reserve_seconds = time.monotonic() - self.placed

    def note_first_token(self, first: pb.FirstToken) -> None:
        if self._is_settled:
            return
        self.prefill_wait, self.prefill_seconds = first.queue_seconds, first.compute_seconds
        self.chunks, self.cached_tokens = first.chunks, first.cached_tokens
        self.fetch_seconds = first.fetch_seconds

    def note_pushed(self, pushed: pb.Pushed) -> None:
        if not self._is_settled:
            self.bytes, self.push_seconds = pushed.bytes, pushed.seconds
            self.exposed_seconds = pushed.exposed_seconds

    def note_step(self, step: pb.StepTokens) -> None:
        """Notes a worker's durations of the first steps; ignores later ones."""
        if self.second or self._is_settled:
            return
        if self.placement is None or self.placement.prefill:
            self.admit_seconds = self.admit_seconds or step.queue_seconds
            self.first_decode_seconds = self.first_decode_seconds or step.compute_seconds
        elif not self.first:
            self.prefill_wait, self.prefill_seconds = step.queue_seconds, step.compute_seconds
            self.cached_tokens = step.cached_tokens

    def note_guesses(self, guessed: int, accepted: int) -> None:
        self.accepted_tokens += accepted
        self.rejected_tokens += guessed - accepted

    def note_tokens(self, tokens: int) -> None:
        """Notes the arrival of tokens."""
        now = time.monotonic()
        if not self.first:
            self.first = now
        else:
            gap = now - self.last
            if self._recovering:
                self.lost_after += gap
                self._recovering = False
            if not self.second:
                self.second = now
            if gap > self.longest_gap:
                self.longest_gap = gap
        self.last = now
        self.tokens += tokens

    def note_text(self, *, finished: bool) -> None:
        """Notes that the new tokens are turned into text."""
        now = self.last_text = time.monotonic()
        self.text_seconds += now - self.last
        if not self.first_text:
            self.first_text = now
        self.finished = finished

    def write(self, began: float) -> None:
        """Notes that the answer so far was written to the client, from `began` until now."""
        now = time.monotonic()
        self.write_seconds += now - began
        if not self.first_written and self.first:
            self.first_written = now
        if self.finished:
            self.ended = now


_PROMPT_FIELDS = {
    "arrived",
    "parsed",
    "ready",
    "template_seconds",
    "tokenize_seconds",
    "prompt_tokens",
}


def rounded(similarity: float) -> float:
    """Rounds down, so that a similarity never looks higher than it is."""
    return math.floor(similarity * 1e4) / 1e4


class RequestLedger:
    """The ledger of one call: an entry for each answer to each of its prompts."""

    def __init__(
        self,
        request_id: str,
        arrived: float,
        answers: int = 1,
        *,
        owner: str = "",
        traceparent: str = "",
        model: str = "",
    ) -> None:
        """Begins the ledger of a call that arrived at `arrived` and is now parsed."""
        parsed = time.monotonic()
        self.request_id = request_id
        self.arrived = arrived
        self.arrived_at = time.time()
        self.answers = [AnswerLedger(arrived, parsed) for _ in range(answers)]
        self.owner = owner  # the API key's name, if keys are required
        self.traceparent = traceparent[:MAX_TRACEPARENT]  # the caller's trace (W3C), if any
        self.model = model  # the name of the model or the adapter
        self.outcome = ""
        self.ended = 0.0

    @property
    def name(self) -> tuple[str, str]:
        """The key of the ledger: request ids are unique only for one owner."""
        return self.owner, self.request_id

    @property
    def cache_header(self) -> str:
        """The cache header of a call whose answers all came from the response cache; else ""."""
        found = [each.response_cache for each in self.answers if each.response_cache]
        if len(found) < len(self.answers):
            return ""
        age = max(each.age_seconds for each in found)
        similar = [each.similarity for each in found if each.HasField("similarity")]
        if not similar:
            return f"exact; age={age:.0f}"
        # Several answers are described by the least certain one.
        verified = "; verified" if all(each.verified for each in found) else ""
        return f"semantic; similarity={rounded(min(similar))}; age={age:.0f}{verified}"

    def end(self) -> None:
        """Notes that the last byte was written. Later calls have no effect."""
        if not self.ended:
            self.ended = time.monotonic()
            alone = len(self.answers) == 1
            for answer in self.answers:
                answer.ended = self.ended if alone else answer.ended or self.ended


class Ledgers:
    """The ledgers of the latest requests, running ones included."""

    def __init__(self, limit: int = KEPT_REQUESTS) -> None:
        self._limit = limit
        self._listener: Callable[[RequestLedger], None] | None = None
        self._kept: OrderedDict[tuple[str, str], RequestLedger] = OrderedDict()

    @contextmanager
    def keep(self, ledger: RequestLedger) -> Iterator[RequestLedger]:
        """Ends the ledger on exit. Drops refused requests, which would displace served ones in an
        overload."""
        self._kept.pop(ledger.name, None)
        self._kept[ledger.name] = ledger
        if len(self._kept) > self._limit:
            self._kept.popitem(last=False)
        try:
            yield ledger
        finally:
            ledger.end()
            if ledger.outcome and self._listener:
                self._listener(ledger)
            elif not ledger.outcome and self._kept.get(ledger.name) is ledger:
                del self._kept[ledger.name]

    def listen(self, listener: Callable[[RequestLedger], None]) -> None:
        """Calls `listener` with each served request when it ends."""
        self._listener = listener

    def find(self, request_id: str, owner: str | None = None) -> RequestLedger | None:
        """Returns the latest request with this id, of one owner or of any."""
        if owner is not None:
            return self._kept.get((owner, request_id))
        newest_first = reversed(self._kept.values())
        return next((each for each in newest_first if each.request_id == request_id), None)

    def recent(self, limit: int) -> list[RequestLedger]:
        """Newest first."""
        return list(islice(reversed(self._kept.values()), limit))
