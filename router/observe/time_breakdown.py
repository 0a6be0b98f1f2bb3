"""From a ledger to its phases: what a request's time is made of.

Each segment between two marks is cut into the parts that are known of it, in the
order in which they happen; what is left is the segment's own. Nothing is counted
twice: a part that reaches back before its segment went on behind other phases
there, and only what is left of it counts.
"""

from __future__ import annotations

import time
from typing import NamedTuple, TypeAlias

from baton.router.observe.ledger import AnswerLedger, RequestLedger
from baton.v1 import timing_pb2 as pb

KEY = "baton-timing-bin"
"""Of the trailer that holds a RequestTiming."""

# What clients take of metadata in all is 8 KiB by default.
TRAILER_BYTES = 6 * 2**10

SHORTEST_SECONDS = 1e-7
"""Shorter phases are left out: they are rounding."""

Kind: TypeAlias = pb.PhaseKind.ValueType


class Part(NamedTuple):
    kind: Kind
    seconds: float
    worker: str = ""


class _Timeline:
    """Phases laid one behind the other, from the arrival on."""

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self.at = origin
        self.phases: list[pb.Phase] = []
        self._sealed = 0  # so many phases grow no more

    def cut(
        self, until: float, rest: Kind, *parts: Part, since: float = 0.0, worker: str = ""
    ) -> None:
        """Goes on to the mark `until`: first the parts, which began at `since`, then the rest,
        which is a worker's where one is given."""
        until = max(until, self.at)
        start = since or self.at
        for part in parts:
            end = min(start + max(part.seconds, 0.0), until)
            self._add(part.kind, end, part.worker)
            start = end
        self._add(rest, until, worker)

    def seal(self) -> None:
        """No phase goes on across this."""
        self._sealed = len(self.phases)

    def hide(self, kind: Kind, start: float, seconds: float, worker: str) -> None:
        """Something that went on behind other phases."""
        if seconds > SHORTEST_SECONDS:
            self.phases.append(_phase(kind, start - self._origin, seconds, worker, hidden=True))

    def _add(self, kind: Kind, end: float, worker: str) -> None:
        seconds = end - self.at
        if seconds <= SHORTEST_SECONDS:
            return
        last = self.phases[-1] if len(self.phases) > self._sealed else None
        if last and (last.kind, last.worker) == (kind, worker):
            last.seconds += seconds
        else:
            self.phases.append(_phase(kind, self.at - self._origin, seconds, worker))
        self.at = end


def request_timing(ledger: RequestLedger, *, phases: bool = True) -> pb.RequestTiming:
    """A request as it is now; without `phases`, only its figures."""
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
    )


def trailer(ledger: RequestLedger) -> bytes:
    """A RequestTiming that fits a trailer: where there are too many answers, the last are cut."""
    timing = request_timing(ledger)
    while timing.ByteSize() > TRAILER_BYTES:
        del timing.answers[-1]
    return timing.SerializeToString()


def answer_timing(ledger: AnswerLedger, index: int, *, phases: bool = True) -> pb.AnswerTiming:
    end = ledger.ended or time.monotonic()
    timing = pb.AnswerTiming(
        index=index,
        attempts=ledger.attempts,
        prompt_tokens=ledger.prompt_tokens,
        cached_tokens=ledger.cached_tokens,
        completion_tokens=ledger.tokens,
        ttft_seconds=_first_shown(ledger) - ledger.arrived if ledger.first else 0.0,
        end_to_end_seconds=end - ledger.arrived,
        longest_gap_seconds=ledger.longest_gap,
        transferred_bytes=ledger.bytes,
    )
    if placement := ledger.placement:
        timing.prefill_worker, timing.decode_worker = placement.prefill, placement.decode
        timing.policy, timing.reason_code = placement.policy.value, placement.code.value
    if phases:
        timing.phases.extend(answer_phases(ledger, end))
        timing.chunks.extend(ledger.chunks)
    return timing


def answer_phases(ledger: AnswerLedger, end: float) -> list[pb.Phase]:
    """All phases of an answer, up to `end`; those that are hidden come last."""
    line = _Timeline(ledger.arrived)
    _cut_prompt(line, ledger, end)
    if ledger.first:
        _cut_first_token(line, ledger)
        _cut_second_token(line, ledger)
        _cut_later_tokens(line, ledger, end)
        _hide(line, ledger)
    return line.phases


def _cut_prompt(line: _Timeline, ledger: AnswerLedger, end: float) -> None:
    """Up to the first token."""
    reader = _reader(ledger)
    fetch = min(ledger.fetch_seconds, ledger.prefill_wait)
    line.cut(ledger.parsed or end, pb.PHASE_KIND_PARSE)
    line.cut(
        ledger.ready or end,
        pb.PHASE_KIND_QUEUE,
        Part(pb.PHASE_KIND_TEMPLATE, ledger.template_seconds),
        Part(pb.PHASE_KIND_TOKENIZE, ledger.tokenize_seconds),
    )
    lost = Part(pb.PHASE_KIND_RETRY, ledger.lost_before)
    line.cut(ledger.placed or end, pb.PHASE_KIND_QUEUE, lost)
    line.cut(
        ledger.first or end,
        pb.PHASE_KIND_NETWORK,
        Part(pb.PHASE_KIND_FETCH, fetch, reader),
        Part(pb.PHASE_KIND_PREFILL_WAIT, ledger.prefill_wait - fetch, reader),
        Part(pb.PHASE_KIND_PREFILL, ledger.prefill_seconds, reader),
    )


def _cut_first_token(line: _Timeline, ledger: AnswerLedger) -> None:
    """Up to the first token in the client's hands."""
    line.cut(ledger.first_text, pb.PHASE_KIND_DETOKENIZE)
    line.cut(_first_shown(ledger), pb.PHASE_KIND_WRITE)
    line.seal()


def _cut_second_token(line: _Timeline, ledger: AnswerLedger) -> None:
    """The way of the pages, which began with the first token, at the latest."""
    if not ledger.second:
        return
    reserve = ledger.exposed_reserve
    decode = ledger.placement.decode if ledger.placement else ""
    line.cut(
        ledger.second,
        pb.PHASE_KIND_NETWORK if ledger.admit_seconds else pb.PHASE_KIND_DECODE,
        Part(pb.PHASE_KIND_RESERVE, reserve, decode),
        Part(pb.PHASE_KIND_TRANSFER, ledger.exposed_seconds - reserve, _reader(ledger)),
        Part(pb.PHASE_KIND_ADMIT, ledger.admit_seconds, decode),
        Part(pb.PHASE_KIND_FIRST_DECODE, ledger.first_decode_seconds, decode),
        since=ledger.first,
        worker="" if ledger.admit_seconds else decode,
    )


def _cut_later_tokens(line: _Timeline, ledger: AnswerLedger, end: float) -> None:
    """Up to the end: the rest of the answer, then its last bytes."""
    text = max(ledger.text_seconds - (ledger.first_text - ledger.first), 0.0)
    text -= ledger.last_text - ledger.last
    decode = max(ledger.last - line.at - ledger.lost_after - max(text, 0.0), 0.0)
    worker = ledger.placement.decode if ledger.placement else ""
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


def _hide(line: _Timeline, ledger: AnswerLedger) -> None:
    placement = ledger.placement
    decode = placement.decode if placement else ""
    reserve = ledger.reserve_seconds - ledger.exposed_reserve
    line.hide(pb.PHASE_KIND_RESERVE, ledger.placed, reserve, decode)
    shown = sum(each.seconds for each in line.phases if each.kind == pb.PHASE_KIND_TRANSFER)
    moving = ledger.push_seconds - shown
    began = max(ledger.first - moving, ledger.placed)
    line.hide(pb.PHASE_KIND_TRANSFER, began, moving, _reader(ledger))
    written = sum(each.seconds for each in line.phases if each.kind == pb.PHASE_KIND_WRITE)
    start = ledger.first_written or ledger.last_text
    line.hide(pb.PHASE_KIND_WRITE, start, ledger.write_seconds - written, "")


def _first_shown(ledger: AnswerLedger) -> float:
    """When the first token was written to the client; when it was ready, where it is not yet."""
    return ledger.first_written or ledger.first_text or ledger.first


def _reader(ledger: AnswerLedger) -> str:
    placement = ledger.placement
    return (placement.prefill or placement.decode) if placement else ""


def _phase(
    kind: Kind, start: float, seconds: float, worker: str, *, hidden: bool = False
) -> pb.Phase:
    return pb.Phase(kind=kind, start_seconds=start, seconds=seconds, worker=worker, hidden=hidden)
