"""Turns a ledger into phases: where a request's time went.

Each segment between two marks is cut into its known parts, in the order in which they happen; the
rest of a segment has its own kind. Nothing counts twice: of a part that began before its segment,
hidden behind other phases, only the remainder counts.
"""

from __future__ import annotations

import time
from typing import NamedTuple, TypeAlias

from baton.router.observe.ledger import AnswerLedger, RequestLedger
from baton.v1 import timing_pb2 as pb

KEY = "baton-timing-bin"
"""The name of the trailer with a RequestTiming."""

TRAILER_BYTES = 6 * 2**10
"""Clients accept 8 KiB of metadata by default."""

SHORTEST_SECONDS = 1e-7
"""Shorter phases are rounding errors and left out."""

Kind: TypeAlias = pb.PhaseKind.ValueType


class Part(NamedTuple):
    kind: Kind
    seconds: float
    worker: str = ""


class _Timeline:
    """Consecutive phases from the arrival on."""

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self.at = origin
        self.phases: list[pb.Phase] = []
        self._sealed = 0  # number of phases that no longer grow

    def cut(
        self, until: float, rest: Kind, *parts: Part, since: float = 0.0, worker: str = ""
    ) -> None:
        """Advances to the mark `until`: adds the parts, which began at `since`, then the rest, with
        its worker."""
        until = max(until, self.at)
        start = since or self.at
        for part in parts:
            end = min(start + max(part.seconds, 0.0), until)
            self._add(part.kind, end, part.worker)
            start = end
        self._add(rest, until, worker)

    def seal(self) -> None:
        """Ends the last phase: none extends across this mark."""
        self._sealed = len(self.phases)

    def hide(self, kind: Kind, start: float, seconds: float, worker: str) -> None:
        """Adds a phase that ran behind others."""
        if seconds > SHORTEST_SECONDS:
            self._append(kind, start, seconds, worker, hidden=True)

    def total(self, kind: Kind) -> float:
        return sum(phase.seconds for phase in self.phases if phase.kind == kind)

    def _add(self, kind: Kind, end: float, worker: str) -> None:
        seconds = end - self.at
        if seconds <= SHORTEST_SECONDS:
            return
        last = self.phases[-1] if len(self.phases) > self._sealed else None
        if last and (last.kind, last.worker) == (kind, worker):
            last.seconds += seconds
        else:
            self._append(kind, self.at, seconds, worker)
        self.at = end

    def _append(
        self, kind: Kind, start: float, seconds: float, worker: str, *, hidden: bool = False
    ) -> None:
        start -= self._origin
        self.phases.append(
            pb.Phase(kind=kind, start_seconds=start, seconds=seconds, worker=worker, hidden=hidden)
        )


def request_timing(ledger: RequestLedger, *, phases: bool = True) -> pb.RequestTiming:
    """Returns a request's timing so far; without `phases`, only totals."""
    answers = [
        answer_timing(answer, index, phases=phases) for index, answer in enumerate(ledger.answers)
    ]
    return pb.RequestTiming(
        request_id=ledger.request_id,
        arrived_at=ledger.arrived_at,
        outcome=ledger.outcome.lower(),
        ttft_seconds=min((each.ttft_seconds for each in answers if each.ttft_seconds), default=0.0),
        end_to_end_seconds=(ledger.ended or time.monotonic()) - ledger.arrived,
        answers=answers,
        model=ledger.model,
    )


def trailer(ledger: RequestLedger) -> bytes:
    """Returns a RequestTiming that fits into a trailer, if necessary without the last answers."""
    timing = request_timing(ledger)
    while timing.ByteSize() > TRAILER_BYTES:
        del timing.answers[-1]
    return timing.SerializeToString()


def answer_timing(ledger: AnswerLedger, index: int, *, phases: bool = True) -> pb.AnswerTiming:
    end = ledger.ended or time.monotonic()
    timing = pb.AnswerTiming(
        index=index,
        attempts=ledger.attempts,
        retry_reason=ledger.retry_reason,
        prompt_tokens=ledger.prompt_tokens,
        cached_tokens=ledger.cached_tokens,
        completion_tokens=ledger.tokens,
        accepted_tokens=ledger.accepted_tokens,
        rejected_tokens=ledger.rejected_tokens,
        ttft_seconds=_first_shown(ledger) - ledger.arrived if ledger.first else 0.0,
        end_to_end_seconds=end - ledger.arrived,
        longest_gap_seconds=ledger.longest_gap,
        transferred_bytes=ledger.bytes,
        response_cache=ledger.response_cache,
        refused_hit=ledger.refused_hit,
    )
    if placement := ledger.placement:
        timing.prefill_worker, timing.decode_worker = placement.prefill, placement.decode
        timing.policy, timing.reason_code = placement.policy.value, placement.code.value
    if phases:
        timing.phases.extend(answer_phases(ledger, end))
        timing.chunks.extend(ledger.chunks)
    return timing


def answer_phases(ledger: AnswerLedger, end: float) -> list[pb.Phase]:
    """Returns all phases of an answer until `end`; hidden ones come last."""
    line = _Timeline(ledger.arrived)
    prefill, decode = _workers(ledger)
    _cut_prompt(line, ledger, end, prefill)
    if ledger.first:
        line.cut(ledger.first_text, pb.PHASE_KIND_DETOKENIZE)
        held = Part(pb.PHASE_KIND_VERIFY, ledger.held_seconds)
        line.cut(_first_shown(ledger), pb.PHASE_KIND_WRITE, held)
        line.seal()
        _cut_second_token(line, ledger, prefill, decode)
        _cut_later_tokens(line, ledger, end, decode)
        _hide(line, ledger, prefill, decode)
    return line.phases


def _workers(ledger: AnswerLedger) -> tuple[str, str]:
    """Returns the worker that prefills the prompt and the one that decodes."""
    placement = ledger.placement
    return (placement.prefill or placement.decode, placement.decode) if placement else ("", "")


def _cut_prompt(line: _Timeline, ledger: AnswerLedger, end: float, prefill: str) -> None:
    """Adds the phases up to the first token."""
    fetch = min(ledger.fetch_seconds, ledger.prefill_wait)
    line.cut(ledger.parsed or end, pb.PHASE_KIND_PARSE)
    line.cut(
        ledger.ready or end,
        pb.PHASE_KIND_QUEUE,
        Part(pb.PHASE_KIND_TEMPLATE, ledger.template_seconds),
        Part(pb.PHASE_KIND_TOKENIZE, ledger.tokenize_seconds),
    )
    if ledger.response_cache:
        line.cut(ledger.first or end, pb.PHASE_KIND_RESPONSE_CACHE)
        return
    lost = Part(pb.PHASE_KIND_RETRY, ledger.lost_before)
    line.cut(ledger.placed or end, pb.PHASE_KIND_QUEUE, lost)
    line.cut(
        ledger.first or end,
        pb.PHASE_KIND_NETWORK,
        Part(pb.PHASE_KIND_FETCH, fetch, prefill),
        Part(pb.PHASE_KIND_PREFILL_WAIT, ledger.prefill_wait - fetch, prefill),
        Part(pb.PHASE_KIND_PREFILL, ledger.prefill_seconds, prefill),
    )


def _cut_second_token(line: _Timeline, ledger: AnswerLedger, prefill: str, decode: str) -> None:
    """Adds the phases up to the second token: the transfer and the first decode step."""
    if not ledger.second:
        return
    reserve = ledger.exposed_reserve
    line.cut(
        ledger.second,
        pb.PHASE_KIND_NETWORK if ledger.admit_seconds else pb.PHASE_KIND_DECODE,
        Part(pb.PHASE_KIND_RESERVE, reserve, decode),
        Part(pb.PHASE_KIND_TRANSFER, ledger.exposed_seconds - reserve, prefill),
        Part(pb.PHASE_KIND_ADMIT, ledger.admit_seconds, decode),
        Part(pb.PHASE_KIND_FIRST_DECODE, ledger.first_decode_seconds, decode),
        since=ledger.first,
        worker="" if ledger.admit_seconds else decode,
    )


def _cut_later_tokens(line: _Timeline, ledger: AnswerLedger, end: float, worker: str) -> None:
    """Adds the phases up to the end: the rest of the answer, then the last write."""
    text = max(ledger.text_seconds - (ledger.first_text - ledger.first), 0.0)
    text -= ledger.last_text - ledger.last
    decode = max(ledger.last - line.at - ledger.lost_after - max(text, 0.0), 0.0)
    line.cut(
        ledger.last,
        pb.PHASE_KIND_NETWORK,
        Part(pb.PHASE_KIND_DECODE, decode, worker),
        Part(pb.PHASE_KIND_RETRY, ledger.lost_after),
        Part(pb.PHASE_KIND_DETOKENIZE, text),
    )
    line.cut(ledger.last_text, pb.PHASE_KIND_DETOKENIZE)
    if ledger.finished:
        line.cut(end, pb.PHASE_KIND_WRITE)
    else:
        line.cut(end, pb.PHASE_KIND_DECODE, worker=worker)


def _hide(line: _Timeline, ledger: AnswerLedger, prefill: str, decode: str) -> None:
    reserve = ledger.reserve_seconds - ledger.exposed_reserve
    line.hide(pb.PHASE_KIND_RESERVE, ledger.placed, reserve, decode)
    moving = ledger.push_seconds - line.total(pb.PHASE_KIND_TRANSFER)
    began = max(ledger.first - moving, ledger.placed)
    line.hide(pb.PHASE_KIND_TRANSFER, began, moving, prefill)
    writing = ledger.write_seconds - line.total(pb.PHASE_KIND_WRITE)
    line.hide(pb.PHASE_KIND_WRITE, ledger.first_written or ledger.last_text, writing, "")


def _first_shown(ledger: AnswerLedger) -> float:
    """Returns when the first token was written to the client, or when it was ready."""
    return ledger.first_written or ledger.first_text or ledger.first
