"""Finds what limits a cluster and what to change: a pure function of measurements.

A cluster is bound by what its requests wait for. If they hardly wait, it keeps up or is idle.
Decode engines compute whenever there is an answer to continue, however small the batch, so busy
decode engines alone are no sign of a limit. Nor are waits of a request that is alone on its
worker: another worker would not shorten them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from baton.v1 import cluster_pb2 as pb

IDLE_SHARE = 0.1
"""Engines with a lower busy share are idle."""
BUSY_SHARE = 0.85
"""Engines with a higher busy share have no time left."""
FELT_SHARE = 0.15
"""A wait matters from this share of the TTFT on."""
LONG_SECONDS = 0.05
"""Longer waits matter even if no worker has several requests at the moment."""
FULL_SHARE = 0.1
"""A pool with a smaller share of free pages is full."""
LARGE_BATCH = 8
"""With this many requests in a step, a smaller batch would take less time."""
TARGET_SHARE = 0.7
"""The busy share of prefill with which bursts do not wait."""
FEW_CACHED = 0.05
"""With a smaller cached share of prompt tokens, a better use of the cache is advised."""

Bound: TypeAlias = pb.Bound.ValueType
Advise: TypeAlias = Callable[[pb.Diagnosis], list[str]]


def diagnose(
    traffic: pb.Traffic, prefill: pb.PoolLoad, decode: pb.PoolLoad, queued: int
) -> pb.Diagnosis:
    """Diagnoses a cluster; `queued` requests wait in the router."""
    seen = pb.Diagnosis(traffic=traffic, prefill=prefill, decode=decode)
    seen.bound = _bound(seen, queued)
    seen.sentence, advise = _VERDICTS[seen.bound]
    seen.evidence.extend(_evidence(seen, queued))
    seen.advice.extend(advise(seen))
    return seen


def _bound(seen: pb.Diagnosis, queued: int) -> Bound:
    prefill, decode = seen.prefill, seen.decode
    if not prefill.workers or not decode.workers:
        return pb.BOUND_WORKERS
    waiting = queued + prefill.waiting + decode.waiting
    if not waiting and max(prefill.busy_share, decode.busy_share) < IDLE_SHARE:
        return pb.BOUND_IDLE
    shared = queued > 0 or _shared(prefill) or _shared(decode)
    wait, bound = max(_waits(seen))
    felt = seen.traffic.answers and wait > FELT_SHARE * seen.traffic.ttft_seconds
    if felt and (shared or wait > LONG_SECONDS):
        return bound
    if prefill.busy_share > BUSY_SHARE and prefill.waiting and _shared(prefill):
        return pb.BOUND_PREFILL
    if decode.waiting and _shared(decode):
        return pb.BOUND_DECODE
    if decode.busy_share > BUSY_SHARE and _batch(decode) >= LARGE_BATCH:
        return pb.BOUND_DECODE
    return pb.BOUND_NONE


def _shared(pool: pb.PoolLoad) -> bool:
    """True if some of its workers must have several requests."""
    return pool.waiting + pool.running > pool.workers


def _batch(decode: pb.PoolLoad) -> float:
    """Returns the mean number of requests in a step."""
    return decode.running / decode.workers


def _waits(seen: pb.Diagnosis) -> list[tuple[float, Bound]]:
    """Returns mean waits of an answer. The wait in the router's queue counts for the full pool."""
    traffic, decode = seen.traffic, seen.decode
    at_prefill = traffic.prefill_wait_seconds
    at_decode = traffic.reserve_seconds + traffic.admit_seconds
    if decode.free_share < FULL_SHARE or decode.waiting > seen.prefill.waiting:
        at_decode += traffic.queue_seconds
    else:
        at_prefill += traffic.queue_seconds
    return [
        (at_prefill, pb.BOUND_PREFILL),
        (at_decode, pb.BOUND_DECODE),
        (traffic.exposed_seconds, pb.BOUND_TRANSFER),
    ]


def _evidence(seen: pb.Diagnosis, queued: int) -> list[str]:
    traffic, prefill, decode = seen.traffic, seen.prefill, seen.decode
    lines = [
        f"prefill: {_pool(prefill)}, {prefill.queued_tokens:,} prompt tokens to compute",
        f"decode: {_pool(decode)}, {_count(decode.running, 'request')} in batches,"
        f" {decode.free_share:.0%} of the pages free",
    ]
    if decode.guessed_steps:
        lines.append(f"speculation: {_guesses(decode)}")
    if queued:
        verb = "waits" if queued == 1 else "wait"
        lines.append(f"router: {_count(queued, 'request')} {verb} for a worker with room")
    if not traffic.answers:
        return lines
    seconds = max(traffic.seconds, 1.0)
    return [
        f"last {traffic.seconds:.0f} s: {traffic.answers / seconds:.2f} answers a second,"
        f" {traffic.prompt_tokens / seconds:,.0f} prompt tokens a second"
        f" ({_cached_share(traffic):.0%} cached),"
        f" {traffic.output_tokens / seconds:,.0f} generated",
        f"prompts of {_lengths(traffic.prompt_length)} tokens, answers of"
        f" {_lengths(traffic.output_length)}",
        f"time to the first token {_times(traffic.ttft)}; between tokens {_times(traffic.itl)}",
        f"of {_ms(traffic.ttft_seconds)} to the first token on average:"
        f" {_ms(traffic.queue_seconds)} in the router's queue,"
        f" {_ms(traffic.prefill_wait_seconds)} in prefill's,"
        f" {_ms(traffic.prefill_seconds)} computing; after it {_ms(traffic.reserve_seconds)} for"
        f" decode's pages, {_ms(traffic.exposed_seconds)} for the transfer,"
        f" {_ms(traffic.admit_seconds)} for a place in a batch",
        *lines,
    ]


def _guesses(decode: pb.PoolLoad) -> str:
    share = decode.accepted_tokens / max(decode.guessed_tokens, 1)
    each = 1 + decode.accepted_tokens / decode.guessed_steps
    return (
        f"{share:.0%} of {decode.guessed_tokens:,} guesses right, {each:.1f} tokens of a request in"
        " a step with guesses"
    )


def _cached_share(traffic: pb.Traffic) -> float:
    return traffic.cached_tokens / max(traffic.prompt_tokens, 1)


def _pool(pool: pb.PoolLoad) -> str:
    return (
        f"{_count(pool.workers, 'worker')}, computing {pool.busy_share:.0%} of the time,"
        f" {pool.waiting} waiting"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _lengths(spread: pb.Spread) -> str:
    return f"{spread.p50:,.0f} (p50) to {spread.p99:,.0f} (p99)"


def _times(spread: pb.Spread) -> str:
    return f"{_ms(spread.p50)} (p50), {_ms(spread.p90)} (p90), {_ms(spread.p99)} (p99)"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1.0 else f"{seconds:,.2f} s"


def _switch_one(name: str, pool: pb.PoolLoad) -> list[str]:
    """Advises to take a worker from the other pool if that is hardly busy."""
    if pool.workers < 2 or pool.busy_share >= TARGET_SHARE / 2:
        return []
    return [f"or move one over: {name}'s {pool.workers} compute {pool.busy_share:.0%} of the time"]


def _for_workers(seen: pb.Diagnosis) -> list[str]:
    pools = (("prefill", seen.prefill), ("decode", seen.decode))
    missing = " and ".join(name for name, pool in pools if not pool.workers)
    return [f"start {missing} workers, or run `baton status` to see why they cannot be used"]


def _for_prefill(seen: pb.Diagnosis) -> list[str]:
    traffic, prefill = seen.traffic, seen.prefill
    needed = round(prefill.workers * max(prefill.busy_share, BUSY_SHARE) / TARGET_SHARE + 0.5)
    needed = max(needed, prefill.workers + 1)
    busy = prefill.busy_share * prefill.workers / needed
    advice = [
        f"run {needed} prefill workers instead of {prefill.workers} (prefill.workers): at this load"
        f" they would compute {busy:.0%} of the time instead of {prefill.busy_share:.0%}",
        *_switch_one("decode", seen.decode),
    ]
    if _cached_share(traffic) < FEW_CACHED:
        advice.append(
            f"only {_cached_share(traffic):.0%} of the prompt tokens were cached: put what prompts"
            " have in common at their front, under one cache_salt, or give prefill more kv_memory"
        )
    if traffic.prompt_length.p99 > 8 * max(traffic.prompt_length.p50, 1.0):
        advice.append(
            "a few prompts are far longer than the others, which wait behind them: a smaller"
            " prefill.chunk_tokens does not help, another prefill worker does"
        )
    return advice


def _for_decode(seen: pb.Diagnosis) -> list[str]:
    advice, decode = [], seen.decode
    if decode.free_share < FULL_SHARE:
        advice.append(
            f"decode's pools are full ({decode.free_share:.0%} free): give decode more kv_memory"
        )
    elif decode.waiting:
        advice.append("requests wait though pages are free: raise decode.max_batch")
    return [
        *advice,
        f"run {decode.workers + 1} decode workers instead of {decode.workers} (decode.workers):"
        f" {_gain(seen)}",
        *_switch_one("prefill", seen.prefill),
    ]


def _gain(seen: pb.Diagnosis) -> str:
    """Says what one more decode worker would change."""
    decode = seen.decode
    if _batch(decode) >= 2:
        after = decode.running / (decode.workers + 1)
        return f"a step would serve {after:.1f} requests instead of {_batch(decode):.1f}"
    wait = next(wait for wait, bound in _waits(seen) if bound == pb.BOUND_DECODE)
    return (
        f"requests that wait for pages or a batch ({decode.waiting} now, {_ms(wait)} on average)"
        " could use the new worker's"
    )


def _for_transfer(seen: pb.Diagnosis) -> list[str]:
    traffic = seen.traffic
    speed = traffic.transferred_bytes / max(traffic.transfer_seconds, 1e-9) / 1e9
    return [
        f"pages move at {speed:.2f} GB/s: run `baton doctor` to see which transport is used and"
        " how fast it is",
        "keep prefill and decode workers that serve each other on one host, or on one fast network",
        "a smaller prefill.chunk_tokens starts the transfer earlier, behind the chunks that follow",
    ]


_VERDICTS: dict[Bound, tuple[str, Advise]] = {
    pb.BOUND_WORKERS: ("a pool has no worker that can be used", _for_workers),
    pb.BOUND_IDLE: ("the cluster is idle", lambda seen: []),
    pb.BOUND_NONE: ("both pools keep up with the load", lambda seen: []),
    pb.BOUND_PREFILL: ("the cluster is bound by prefill", _for_prefill),
    pb.BOUND_DECODE: ("the cluster is bound by decode", _for_decode),
    pb.BOUND_TRANSFER: ("the cluster is bound by the transfer of pages", _for_transfer),
}
