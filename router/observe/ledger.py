"""Where each request's time goes: marks on the router's clock, and durations that workers report.

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
    """The ledger of one answer. Marks are of time.monotonic(), and 0 until they are made."""

    arrived: float
    parsed: float = 0.0
    ready: float = 0.0  # the prompt is tokens
    placed: float = 0.0  # for the last time before the first token
    first: float = 0.0  # token
    first_text: float = 0.0
    first_written: float = 0.0
    second: float = 0.0  # tokens after the first
    last: float = 0.0  # tokens so far
    last_text: float = 0.0
    ended: float = 0.0

    # Measured here.
    template_seconds: float = 0.0
    tokenize_seconds: float = 0.0
    text_seconds: float = 0.0  # of all tokens
    write_seconds: float = 0.0  # of all messages
    longest_gap: float = 0.0
    lost_before: float = 0.0  # in attempts that ended before the first token
    lost_after: float = 0.0  # from a token to the next, where an attempt ended between them
    reserve_seconds: float = 0.0  # from the placement to the ticket
    held_seconds: float = 0.0  # the first token, while a hit was verified

    # Reported by workers, of the attempt that brought the first token.
    prefill_wait: float = 0.0  # includes the wait for fetched pages
    fetch_seconds: float = 0.0
    prefill_seconds: float = 0.0
    chunks: Sequence[timing_pb2.Chunk] = ()
    push_seconds: float = 0.0
    exposed_seconds: float = 0.0
    admit_seconds: float = 0.0
    first_decode_seconds: float = 0.0

    response_cache: timing_pb2.ResponseCache | None = None  # where the answer came from it
    refused_hit: timing_pb2.RefusedHit | None = None
    placement: Placement | None = None
    attempts: int = 0
    retry_reason: str = ""  # of the last attempt but the first
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    accepted_tokens: int = 0  # of these, those that were guessed
    rejected_tokens: int = 0  # that were guessed and wrong
    bytes: int = 0
    finished: bool = False  # the answer is complete
    _recovering: bool = False

    @property
    def queue_seconds(self) -> float:
        """Seconds in the router's queue before the first token."""
        return max(self.placed - self.ready - self.lost_before, 0.0)

    @property
    def exposed_reserve(self) -> float:
        """The wait for decode's pages that was left when the first token came."""
        return max(self.placed + self.reserve_seconds - self.first, 0.0)

    def prepare(self, template_seconds: float, tokenize_seconds: float, tokens: int) -> None:
        self.ready = time.monotonic()
        self.template_seconds = template_seconds
        self.tokenize_seconds = tokenize_seconds
        self.prompt_tokens = tokens

    def place(self, placement: Placement) -> None:
        """An attempt begins."""
        self.attempts += 1
        if placement.code is Reason.RETRY:
            self.retry_reason = placement.reason
        if not self.first:
            self.placed = time.monotonic()
            self.placement = placement
            self.reserve_seconds = 0.0

    def replay(self, cache: timing_pb2.ResponseCache) -> None:
        """The answer was found in the response cache, possibly after its placement, and after
        tokens that were held back."""
        for each in fields(self):
            if each.name not in _OF_THE_PROMPT:
                setattr(self, each.name, each.default)
        self.response_cache = cache

    def lose(self) -> None:
        """An attempt has failed, and another may begin."""
        if self.first:
            self._recovering = True
        else:
            self.lost_before += time.monotonic() - self.placed

    @property
    def _is_settled(self) -> bool:
        """Whether the first token came in an earlier attempt: later ones change nothing."""
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
        """A worker's times of a step; only those of the first steps are kept."""
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
        """New tokens have arrived."""
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
        """The text of the new tokens is ready."""
        now = self.last_text = time.monotonic()
        self.text_seconds += now - self.last
        if not self.first_text:
            self.first_text = now
        self.finished = finished

    def write(self, began: float) -> None:
        """The answer so far has been written to the client."""
        now = time.monotonic()
        self.write_seconds += now - began
        if not self.first_written and self.first:
            self.first_written = now
        if self.finished:
            self.ended = now


_OF_THE_PROMPT = {
    "arrived",
    "parsed",
    "ready",
    "template_seconds",
    "tokenize_seconds",
    "prompt_tokens",
}


def rounded(similarity: float) -> float:
    """Rounds down, so that it never seems higher than it is."""
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
        """For a call that came at `arrived` and has now been parsed."""
        parsed = time.monotonic()
        self.request_id = request_id
        self.arrived = arrived
        self.arrived_at = time.time()
        self.answers = [AnswerLedger(arrived, parsed) for _ in range(answers)]
        self.owner = owner  # the API key's name, where keys are required
        self.traceparent = traceparent[:MAX_TRACEPARENT]  # the caller's trace (W3C), if any
        self.model = model  # the name of the model or the adapter
        self.outcome = ""
        self.ended = 0.0

    @property
    def name(self) -> tuple[str, str]:
        """Request ids are unique for one owner only."""
        return self.owner, self.request_id

    @property
    def cache_header(self) -> str:
        """Describes a call whose answers all came from the response cache; else empty."""
        found = [each.response_cache for each in self.answers if each.response_cache]
        if len(found) < len(self.answers):
            return ""
        age = max(each.age_seconds for each in found)
        similar = [each.similarity for each in found if each.HasField("similarity")]
        if not similar:
            return f"exact; age={age:.0f}"
        # Of several answers, the least sure says what the call is.
        verified = "; verified" if all(each.verified for each in found) else ""
        return f"semantic; similarity={rounded(min(similar))}; age={age:.0f}{verified}"

    def end(self) -> None:
        """The last byte has been written. The first call counts."""
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
        """Ends the ledger on exit. A refused request is dropped, so that in an overload those
        that were served stay."""
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
        """The latest request with this id, of one owner or of any."""
        if owner is not None:
            return self._kept.get((owner, request_id))
        newest_first = reversed(self._kept.values())
        return next((each for each in newest_first if each.request_id == request_id), None)

    def recent(self, limit: int) -> list[RequestLedger]:
        """Newest first."""
        return list(islice(reversed(self._kept.values()), limit))
