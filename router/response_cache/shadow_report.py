"""What the semantic cache would have answered (`cache.semantic: shadow`), and from which similarity
on it may be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from baton.v1 import cluster_pb2 as pb
from baton.v1 import responses_pb2

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99)


class JudgedHit(NamedTuple):
    similarity: float
    false: bool


def propose_similarity(hits: Iterable[JudgedHit], false_hit_rate: float) -> float | None:
    """The least similarity from which on at most this share of hits is false, also if the next one
    is. None where too few hits are known, or too many of the most similar are false."""
    ordered = sorted(hits, reverse=True)
    found = None
    wrong = accumulate(hit.false for hit in ordered)
    for number, (hit, false) in enumerate(zip(ordered, wrong, strict=True), start=1):
        # A threshold takes all hits of one similarity, or none.
        last = number == len(ordered) or ordered[number].similarity < hit.similarity
        if last and (false + 1) / (number + 1) <= false_hit_rate:
            found = hit.similarity
    return found


def shadow_report(
    hits: Sequence[responses_pb2.ShadowHit],
    requests: int,
    false_hit_rate: float,
    same_answer: float,
) -> pb.SemanticReportResponse:
    """A hit is false where the two answers are less similar than `same_answer`."""

    def proposed(some: Sequence[responses_pb2.ShadowHit]) -> pb.SemanticThreshold | None:
        judged = [JudgedHit(hit.similarity, hit.answer_similarity < same_answer) for hit in some]
        found = propose_similarity(judged, false_hit_rate)
        return None if found is None else _threshold(some, found, same_answer)

    return pb.SemanticReportResponse(
        requests=requests,
        thresholds=[_threshold(hits, least, same_answer) for least in THRESHOLDS],
        proposed=proposed(hits),
        proposed_verified=proposed([hit for hit in hits if hit.confirmed]),
    )


def _threshold(
    hits: Iterable[responses_pb2.ShadowHit], least: float, same_answer: float
) -> pb.SemanticThreshold:
    """What it would have done."""
    over = [hit for hit in hits if hit.similarity >= least]
    verified = [hit for hit in over if hit.HasField("confirmed")]
    refused = [hit for hit in verified if not hit.confirmed]
    return pb.SemanticThreshold(
        similarity=least,
        hits=len(over),
        different_hits=sum(not hit.same for hit in over),
        false_hits=sum(hit.answer_similarity < same_answer for hit in over),
        seconds=sum(hit.seconds for hit in over),
        prompt_tokens=sum(hit.prompt_tokens for hit in over),
        completion_tokens=sum(hit.completion_tokens for hit in over),
        verified_hits=len(verified),
        refused_hits=len(refused),
        refused_false_hits=sum(hit.answer_similarity < same_answer for hit in refused),
    )
