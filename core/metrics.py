"""Names, help texts and buckets of every metric, one list for code, dashboards and tests, and the
server that gives them to Prometheus."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from baton.core.errors import Internal
from baton.core.tls import NODE, certificate_path, key_path

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry

    from baton.core.config import TlsConfig

# Per request, measured at the router.
TTFT_SECONDS = "baton_time_to_first_token_seconds"
ITL_SECONDS = "baton_inter_token_latency_seconds"
TPOT_SECONDS = "baton_time_per_output_token_seconds"
E2E_SECONDS = "baton_end_to_end_latency_seconds"
PROMPT_TOKENS = "baton_prompt_tokens_total"
GENERATION_TOKENS = "baton_generation_tokens_total"
REQUESTS = "baton_requests_total"
ACTIVE_REQUESTS = "baton_active_requests"
QUEUED_REQUESTS = "baton_queued_requests"
RETRIES = "baton_retries_total"
PHASE_QUEUE_SECONDS = "baton_phase_queue_seconds"
PREFILL_SECONDS = "baton_prefill_compute_seconds"
TRANSFER_BYTES = "baton_transfer_bytes_total"
TRANSFER_SECONDS = "baton_transfer_seconds_total"
TRANSFER_EXPOSED_SECONDS = "baton_transfer_exposed_seconds"
CACHED_TOKENS = "baton_cached_prompt_tokens_total"
PLACEMENTS = "baton_placements_total"
TTFT_FORECAST_RATIO = "baton_first_token_forecast_ratio"
RESPONSE_LOOKUPS = "baton_response_cache_lookups_total"
RESPONSE_STORES = "baton_response_cache_stores_total"
RESPONSE_BYTES = "baton_response_cache_bytes"
SEMANTIC_LOOKUPS = "baton_semantic_cache_lookups_total"
SEMANTIC_STORES = "baton_semantic_cache_stores_total"
SEMANTIC_VERIFICATIONS = "baton_semantic_cache_verifications_total"
SEMANTIC_HELD_SECONDS = "baton_semantic_cache_held_seconds"

# Per worker, measured at the worker; routers repeat the reported gauges.
PAGES = "baton_pages"
WAITING = "baton_waiting_requests"
RUNNING = "baton_running_requests"
QUEUE_SECONDS = "baton_worker_queue_seconds"
STEP_SECONDS = "baton_step_seconds"
BATCH_SIZE = "baton_batch_size"
COMPUTED_TOKENS = "baton_computed_tokens_total"
GUESSED_TOKENS = "baton_guessed_tokens_total"
ACCEPTED_TOKENS = "baton_accepted_tokens_total"
GUESSED_STEPS = "baton_guessed_steps_total"
DRAFT_SECONDS = "baton_draft_seconds_total"
DRAFT_GUESSES = "baton_draft_guesses_total"
DRAFT_RIGHT = "baton_draft_right_guesses_total"
DAMAGED_PAGES = "baton_damaged_pages_total"
FETCHED_PAGES = "baton_fetched_pages_total"
FAILED_FETCHES = "baton_failed_fetches_total"
FETCH_SECONDS = "baton_fetch_seconds_total"
CACHE_QUERIED_TOKENS = "baton_prefix_cache_queried_tokens_total"
CACHE_HIT_TOKENS = "baton_prefix_cache_hit_tokens_total"
CACHE_EVICTED_PAGES = "baton_prefix_cache_evicted_pages_total"
ADAPTER_EVENTS = "baton_adapter_events_total"
TIER_PAGES = "baton_cache_tier_pages"
TIER_BYTES = "baton_cache_tier_bytes"
TIER_EVENTS = "baton_cache_tier_events_total"
FILES_FAILING = "baton_cache_files_failing"

HELP = {
    TTFT_SECONDS: "From a request's arrival at the router to its first token",
    ITL_SECONDS: "Between two tokens of one answer",
    TPOT_SECONDS: "Mean time per output token after the first, one value per answer",
    E2E_SECONDS: "From arrival to the last token: TTFT + (n - 1) x TPOT",
    PROMPT_TOKENS: "Prompt tokens of accepted requests",
    GENERATION_TOKENS: "Tokens generated",
    REQUESTS: "Requests ended, by outcome: stop, length, or the error's reason",
    ACTIVE_REQUESTS: "Running and queued requests of this router",
    QUEUED_REQUESTS: "Requests in the router's wait queue",
    RETRIES: "Attempts that were retried, by the error's reason",
    PHASE_QUEUE_SECONDS: "Wait before each phase: router (for capacity), prefill, reserve (decode"
    " pages), decode (batch)",
    PREFILL_SECONDS: "From a prompt's first chunk to the first token",
    TRANSFER_BYTES: "Bytes of K/V pages pushed from prefill to decode",
    TRANSFER_SECONDS: "Time in which a request's pages were being written, summed",
    TRANSFER_EXPOSED_SECONDS: "From the end of a prompt's compute to the end of its last write",
    CACHED_TOKENS: "Prompt tokens that were cached: on the prefilling worker (so not computed), or"
    " on the decode worker (so not transferred)",
    PLACEMENTS: "Attempts by placement policy and reason",
    TTFT_FORECAST_RATIO: "Predicted divided by actual time from placement to the first token",
    RESPONSE_LOOKUPS: "Requests looked up in the response cache, by result: hit, miss, failed",
    RESPONSE_STORES: "Responses for the response cache, by result: stored, failed",
    RESPONSE_BYTES: "Bytes of responses in this router's memory",
    SEMANTIC_LOOKUPS: "Searches for similar questions, by result: hit, miss, refused (not"
    " confirmed), failed, late (the first token came before)",
    SEMANTIC_STORES: "Questions for the semantic cache, by result: stored, failed",
    SEMANTIC_VERIFICATIONS: "Hits that the served model was asked about, by result: confirmed,"
    " denied, failed (no answer in time, too)",
    SEMANTIC_HELD_SECONDS: "How long computed first tokens waited while a hit was verified",
    PAGES: "Pages of the K/V pool by state: free, leased, quarantined, cached (which are free too)",
    WAITING: "Requests that wait in a worker for pages or compute",
    RUNNING: "Requests in a worker's current batch",
    QUEUE_SECONDS: "Wait in the worker before its compute starts",
    STEP_SECONDS: "Duration of one step of the engine",
    BATCH_SIZE: "Requests in one step",
    COMPUTED_TOKENS: "Tokens run through the model",
    GUESSED_TOKENS: "Guessed tokens that steps have checked (speculation)",
    ACCEPTED_TOKENS: "Of these, the tokens that were right",
    GUESSED_STEPS: "Steps with guesses, counted for each request (speculation)",
    DRAFT_SECONDS: "Seconds that the draft model computed (speculation)",
    DRAFT_GUESSES: "Guesses of the draft model that were compared with the sampled tokens",
    DRAFT_RIGHT: "Of these, the guesses that were right",
    DAMAGED_PAGES: "Pages that arrived damaged and were requested again",
    FETCHED_PAGES: "Pages that a prefill worker fetched from another worker's cache",
    FAILED_FETCHES: "Fetches that failed: the prompt was computed",
    FETCH_SECONDS: "Time from a fetch's start to its end, summed",
    CACHE_QUERIED_TOKENS: "Tokens looked up in the prefix cache, in full pages",
    CACHE_HIT_TOKENS: "Of these, the tokens found",
    CACHE_EVICTED_PAGES: "Cached pages evicted for new ones",
    ADAPTER_EVENTS: "Adapters by event: requested, hit (loaded when requested), loaded, evicted",
    TIER_PAGES: "Pages in the second tier, by tier: host (memory), files",
    TIER_BYTES: "Bytes of pages in the second tier",
    TIER_EVENTS: "Pages by tier and event: hits (found for a prompt), restored, stored, evicted,"
    " dropped (gone before they could be stored), damaged",
    FILES_FAILING: "1 while pages cannot be written to files",
}

LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0),
)
RATIO_BUCKETS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in four numbers."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Zeros if there are no values."""
        if not len(values):
            return cls(0.0, 0.0, 0.0, 0.0)
        ordered = sorted(values)
        # Nearest rank, so that each percentile is a measured value.
        ranks = (max(0, -(-percent * len(ordered) // 100) - 1) for percent in PERCENTILES)
        return cls(sum(ordered) / len(ordered), *(ordered[rank] for rank in ranks))


def serve_metrics(registry: CollectorRegistry, host: str, port: int, tls: TlsConfig) -> WSGIServer:
    """Serves metrics, over TLS if `tls.folder` is set; Prometheus needs no certificate. Port 0
    takes any free one."""
    from prometheus_client import start_http_server  # commands need the names alone

    folder = Path(tls.folder)
    pem = (str(certificate_path(folder, NODE)), str(key_path(folder, NODE)))
    try:
        server, _ = start_http_server(port, host, registry, *(pem if tls.folder else ()))
    except OSError:
        raise Internal(f"cannot serve metrics on {host}:{port}; is the port taken?") from None
    return server


def end_metrics(server: WSGIServer) -> None:
    """Its thread polls twice a second for its end; shutting down its socket wakes it at once."""
    with contextlib.suppress(OSError):  # not every system can shut down a listening socket
        server.socket.shutdown(socket.SHUT_RDWR)
    server.shutdown()
    server.server_close()
