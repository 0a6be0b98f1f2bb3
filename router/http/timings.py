"""/v1/requests: the latest requests, and where the time of each went."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from baton.v1 import timing_pb2 as pb
from core.errors import UnknownRequest
from router.http.answers import encode
from router.http.fields import Integer, Json
from router.ledger import KEPT_REQUESTS, Ledgers
from router.phases import request_timing

LIMIT = Integer("limit", "How many requests at most.", 1, KEPT_REQUESTS, 50)
_LONGEST_LIMIT = 10
_DIGITS = 6  # of a second


class Timings:
    def __init__(self, ledgers: Ledgers) -> None:
        self._ledgers = ledgers

    async def recent(self, http: HttpRequest) -> Response:
        ledgers = self._ledgers.recent(_limit(http.query_params.get("limit", "")))
        timings = [request_json(request_timing(ledger, phases=False)) for ledger in ledgers]
        return _json({"object": "list", "data": timings})

    async def timing(self, http: HttpRequest) -> Response:
        request_id = http.path_params["request_id"]
        ledger = self._ledgers.find(request_id)
        if ledger is None:
            raise UnknownRequest(
                f"no request called {request_id!r} is among the latest here", field="request_id"
            )
        return _json(request_json(request_timing(ledger)))


def request_json(timing: pb.RequestTiming) -> Json:
    return {
        "request_id": timing.request_id,
        "arrived_at": round(timing.arrived_at, 3),
        "outcome": timing.outcome,
        "ttft_seconds": _seconds(timing.ttft_seconds),
        "end_to_end_seconds": _seconds(timing.end_to_end_seconds),
        "answers": [_answer(answer) for answer in timing.answers],
    }


def _answer(answer: pb.AnswerTiming) -> Json:
    return {
        "index": answer.index,
        "prefill_worker": answer.prefill_worker,
        "decode_worker": answer.decode_worker,
        "policy": answer.policy,
        "reason_code": answer.reason_code,
        "attempts": answer.attempts,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "completion_tokens": answer.completion_tokens,
        "ttft_seconds": _seconds(answer.ttft_seconds),
        "end_to_end_seconds": _seconds(answer.end_to_end_seconds),
        "longest_gap_seconds": _seconds(answer.longest_gap_seconds),
        "transferred_bytes": answer.transferred_bytes,
        "phases": [_phase(phase) for phase in answer.phases],
        "chunks": [
            {"tokens": chunk.tokens, "seconds": _seconds(chunk.seconds)} for chunk in answer.chunks
        ],
    }


def _phase(phase: pb.Phase) -> Json:
    return {
        "kind": pb.PhaseKind.Name(phase.kind).removeprefix("PHASE_KIND_").lower(),
        "start_seconds": _seconds(phase.start_seconds),
        "seconds": _seconds(phase.seconds),
        "hidden": phase.hidden,
        "worker": phase.worker,
    }


def _limit(given: str) -> int:
    number = int(given) if given.isdecimal() and len(given) < _LONGEST_LIMIT else given
    return LIMIT.of({"limit": number if given else None}) or 0


def _seconds(value: float) -> float:
    return round(value, _DIGITS)


def _json(content: Json) -> Response:
    return Response(encode(content), media_type="application/json")
