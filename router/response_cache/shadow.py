"""The semantic cache's shadow mode: requests are computed, and the answers that the cache would
have given are compared with theirs. The results are recorded in Redis, as numbers without texts
and tenants."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from baton.core.errors import BatonError
from baton.router.response_cache.cache_store import StoreFailed
from baton.router.response_cache.redis_store import SEMANTIC_PREFIX, RedisStore
from baton.v1 import cluster_pb2, responses_pb2

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99)
"""Least similarities whose effects a report lists."""
FLOOR = 0.5
"""Hits of lower similarity are not recorded."""
MOST_HITS = 100_000
KEPT_SECONDS = 30 * 86400
_HITS = SEMANTIC_PREFIX + b"shadow:hits"
_REQUESTS = SEMANTIC_PREFIX + b"shadow:requests"

RECORD = """
redis.call('INCR', KEYS[2])
redis.call('EXPIRE', KEYS[2], ARGV[3])
if ARGV[1] == '' then return 0 end
redis.call('LPUSH', KEYS[1], ARGV[1])
redis.call('LTRIM', KEYS[1], 0, ARGV[2] - 1)
return redis.call('EXPIRE', KEYS[1], ARGV[3])
"""

Compare = Callable[[Sequence[int], Sequence[int]], Coroutine[None, None, float]]
"""Returns the similarity of two answers, given by their tokens. Raises BatonError."""


class Computed(NamedTuple):
    """A request's own answer and its cost."""

    token_ids: Sequence[int]
    prompt_tokens: int
    seconds: float  # from the request's arrival to its last token
    compare: Compare


class Shadow:
    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def record(
        self,
        similarity: float,
        found: Sequence[int],
        computed: Computed,
        confirmed: bool | None = None,
    ) -> None:
        """Records a question that would have been answered with `found`. `confirmed` is the result
        of the verification, None without one. Raises StoreFailed."""
        same = list(found) == list(computed.token_ids)
        try:
            answers = 1.0 if same else await computed.compare(found, computed.token_ids)
        except BatonError as error:
            raise StoreFailed("the answers were not compared") from error
        hit = responses_pb2.ShadowHit(
            similarity=similarity,
            same=same,
            answer_similarity=answers,
            seconds=computed.seconds,
            prompt_tokens=computed.prompt_tokens,
            completion_tokens=len(computed.token_ids),
            confirmed=confirmed,
        )
        await self._write(hit.SerializeToString())

    async def record_miss(self) -> None:
        """Records a question without a similar one. Raises StoreFailed."""
        await self._write(b"")

    async def report(
        self, false_hit_rate: float, same_answer: float
    ) -> cluster_pb2.SemanticReportResponse:
        """Reports on all recorded hits. Raises StoreFailed."""
        requests = await self._store.store("GET", _REQUESTS)
        values = await self._store.store("LRANGE", _HITS, "0", "-1")
        kept = values if isinstance(values, list) else []
        hits = [responses_pb2.ShadowHit.FromString(value) for value in kept]
        count = int(requests) if isinstance(requests, bytes) else 0
        return shadow_report(hits, count, false_hit_rate, same_answer)

    async def _write(self, hit: bytes) -> None:
        limits = str(MOST_HITS), str(KEPT_SECONDS)
        await self._store.store("EVAL", RECORD, "2", _HITS, _REQUESTS, hit, *limits)


class JudgedHit(NamedTuple):
    similarity: float
    false: bool


def propose_similarity(hits: Iterable[JudgedHit], false_hit_rate: float) -> float | None:
    """Returns the least similarity from which on at most this share of hits is false, even if one
    more were. None if too few hits are known or too many of the most similar are false."""
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
) -> cluster_pb2.SemanticReportResponse:
    """Builds a report. A hit is false if the two answers are less similar than `same_answer`."""

    def proposed(some: Sequence[responses_pb2.ShadowHit]) -> cluster_pb2.SemanticThreshold | None:
        judged = [JudgedHit(hit.similarity, hit.answer_similarity < same_answer) for hit in some]
        found = propose_similarity(judged, false_hit_rate)
        return None if found is None else _threshold(some, found, same_answer)

    return cluster_pb2.SemanticReportResponse(
        requests=requests,
        thresholds=[_threshold(hits, least, same_answer) for least in THRESHOLDS],
        proposed=proposed(hits),
        proposed_verified=proposed([hit for hit in hits if hit.confirmed]),
    )


def _threshold(
    hits: Iterable[responses_pb2.ShadowHit], least: float, same_answer: float
) -> cluster_pb2.SemanticThreshold:
    """Returns the effects of a least similarity."""
    over = [hit for hit in hits if hit.similarity >= least]
    verified = [hit for hit in over if hit.HasField("confirmed")]
    refused = [hit for hit in verified if not hit.confirmed]
    return cluster_pb2.SemanticThreshold(
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
