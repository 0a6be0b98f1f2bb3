"""The section of a configuration about routers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton.core.config_values import (
    NonNegativeFloat,
    Origins,
    Port,
    PositiveFloat,
    PositiveInt,
    key,
)
from baton.core.types import ToolFormatName


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The routers, where clients connect."""

    count: PositiveInt = key(1, "Routers; each has ports one above the last.", "--routers")
    host: str = key("127.0.0.1", "Where the router listens.", "--host")
    port: Port = key(50051, "The gRPC port.", "--port")
    http_port: Port = key(8000, "The HTTP port.", "--http-port")
    metrics_port: Port = key(8900, "The Prometheus port.", "--metrics-port")
    keys: str = key("", "A file of API keys (`baton keys add`); empty requires none.", "--keys")
    open_metrics: bool = key(
        False,
        "With keys: serve metrics without one. Else the metrics port is open to this host only.",
    )
    cors_origins: Origins = key(
        (),
        "Origins of other sites whose pages may call the HTTP API from a browser, such as"
        ' "https://chat.example.com"; "*" is every site.',
    )
    max_requests: PositiveInt = key(1024, "Running and queued requests; more are refused.")
    max_queued: PositiveInt = key(512, "Requests that may wait for capacity.")
    queue_timeout: PositiveFloat = key(
        600.0,
        "Seconds that a request may wait for capacity; one that is predicted to wait longer is"
        " refused at once.",
    )
    ttft: NonNegativeFloat = key(
        0.0,
        "Objective: seconds to the first token. A request whose first token is predicted later,"
        " because of those before it, is refused at once; 0 has none.",
    )
    worker_backlog: PositiveInt = key(
        16,
        "Requests sent to one worker before it has started, or reserved pages for, earlier ones.",
    )
    placement_timeout: PositiveFloat = key(30.0, "Seconds to wait for workers when there are none.")
    max_worker_deaths: PositiveInt = key(
        2,
        "Lost workers that nothing explains, after which a request runs alone; if it crashes"
        " another one then, it fails.",
    )
    max_attempts: PositiveInt = key(
        8, "Attempts of one request, without those that ended through no fault of its own."
    )
    policy: Literal["kv_aware", "least_loaded", "round_robin"] = key(
        "kv_aware",
        "Placement: by predicted time with cached pages (kv_aware), by load alone (least_loaded),"
        " or in turn (round_robin).",
    )
    local_prefill: Literal["auto", "fallback", "never", "always"] = key(
        "auto",
        "When decode workers prefill prompts themselves: auto if predicted to be faster, or if no"
        " prefill worker has been available for `local_prefill_after`; fallback only for the"
        " latter; never; always.",
    )
    local_prefill_after: NonNegativeFloat = key(
        2.0, "Seconds without a prefill worker before decode workers prefill."
    )
    fetch_pages: Literal["auto", "never", "always"] = key(
        "auto",
        "When a prefill worker fetches a prompt's cached pages from a decode worker: auto if"
        " predicted to be faster than computing them; never; always.",
    )
    first_token_timeout: PositiveFloat = key(600.0, "Seconds from placement to the first token.")
    stall_timeout: PositiveFloat = key(120.0, "Seconds between two tokens.")
    reader_buffer: PositiveInt = key(
        4096, "Tokens buffered for a client that reads slowly; then it is disconnected."
    )
    ping_seconds: PositiveFloat = key(0.5, "Between two heartbeats of a worker.")
    frozen_seconds: PositiveFloat = key(
        3.0, "A worker that sent nothing for this long counts as lost."
    )
    engine_stall_seconds: PositiveFloat = key(
        60.0, "So does a worker whose engine has work and reported nothing for this long."
    )
    canary_seconds: NonNegativeFloat = key(
        30.0, "How often an idle worker generates a token to prove that it can; 0 never."
    )
    otlp_endpoint: str = key(
        "",
        "OTLP/HTTP collector of request traces, such as http://127.0.0.1:4318; empty sends none.",
    )
    generation_config: Literal["auto", "none"] = key(
        "auto",
        "Defaults for what requests leave out: those of the model's generation_config.json (auto),"
        " or none.",
        "--generation-config",
    )
    text_threads: PositiveInt = key(2, "Threads that tokenize and render templates.")
    tool_format: ToolFormatName = key(
        "auto", "The model's format of tool calls; auto derives it from the chat template."
    )
    reasoning: Literal["auto", "on", "off"] = key(
        "auto",
        "Whether reasoning (<think>…</think>) is separated from content; auto derives it from the"
        " chat template.",
    )
