"""The sections of a configuration: routers, pools, caches, batches, TLS, controller, planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from baton.core.config_values import (
    Bytes,
    Niceness,
    NonNegativeFloat,
    NonNegativeInt,
    Origins,
    Port,
    PositiveFloat,
    PositiveInt,
    Share,
    Size,
    WorkerCount,
    key,
)
from baton.core.types import ToolFormatName

_RAY_COUNTS = {"CPU", "GPU", "memory", "object_store_memory"}
_Resources = Annotated[
    Mapping[str, float],
    (
        lambda value: not value.keys() & _RAY_COUNTS and all(n >= 1e-4 for n in value.values()),
        "must have 0.0001 or more of each name, and not CPU, GPU or memory, which Ray counts"
        " itself (GPUs are in `gpus`)",
    ),
]


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The routers, where clients connect."""

    count: PositiveInt = key(
        1, "Routers; the ports of each are one above those of the one before.", "--routers"
    )
    host: str = key("127.0.0.1", "Where the router listens.", "--host")
    port: Port = key(50051, "The gRPC port.", "--port")
    http_port: Port = key(8000, "The HTTP port.", "--http-port")
    metrics_port: Port = key(8900, "The Prometheus port.", "--metrics-port")
    keys: str = key("", "A file of API keys (`baton keys add`); empty requires none.", "--keys")
    open_metrics: bool = key(
        False,
        "With keys: serve metrics without a key. Else the metrics port is open to this host only.",
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
        "Objective: seconds to the first token. A request that is predicted to miss it, because of"
        " those before it, is refused at once; 0: no objective.",
    )
    worker_backlog: PositiveInt = key(
        16,
        "Requests sent to one worker before it has started, or reserved pages for, earlier ones.",
    )
    placement_timeout: PositiveFloat = key(30.0, "Seconds to wait for workers when there are none.")
    max_worker_deaths: PositiveInt = key(
        2,
        "Unexplained losses of workers after which a request runs alone; if it then crashes another"
        " worker, it fails.",
    )
    max_attempts: PositiveInt = key(
        8, "Attempts of one request, not counting those that ended through no fault of its own."
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
    ping_seconds: PositiveFloat = key(0.5, "Seconds between two heartbeats of a worker.")
    frozen_seconds: PositiveFloat = key(
        3.0, "A worker that sent nothing for this long counts as lost."
    )
    engine_stall_seconds: PositiveFloat = key(
        60.0,
        "A worker whose engine has work but reported nothing for this long counts as lost.",
    )
    canary_seconds: NonNegativeFloat = key(
        30.0, "Seconds after which an idle worker generates a token as a health check; 0: never."
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


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The keys of both pools."""

    workers: WorkerCount = key(1, "Workers.")
    host: str = key("127.0.0.1", "Where workers listen.")
    port: Port = key(0, "0 chooses a free port; processes started one by one need a fixed one.")
    kv_memory: Bytes = key(
        Size(0),
        'K/V memory of each worker, such as "2GiB"; 0 chooses by device: 1 GiB, or on a GPU all'
        " that `gpu_memory` leaves.",
        "--kv-memory",
    )
    threads: PositiveInt | None = key(None, "CPU threads of one worker; unset uses all cores.")
    gpus: float | None = key(
        None, "GPUs of one worker; unset uses one for each of its processes if the cluster has any."
    )
    resources: _Resources = key(
        dict, "Resources of a Ray node that one worker needs, such as {baton_prefill: 1}."
    )
    tensor_parallel: PositiveInt = key(
        1,
        "Processes that share the model in each worker; on GPUs each has its own GPU of one node.",
        "--tensor-parallel",
    )


@dataclass(frozen=True, slots=True)
class PrefillConfig(PoolConfig):
    """The prefill pool."""

    workers: WorkerCount = key(1, "Prefill workers.", "--prefill")
    chunk_tokens: NonNegativeInt = key(
        0,
        "Prompt tokens in one step; 0 chooses by device: 512, or 8,192 on a GPU.",
        "--chunk-tokens",
    )
    background_tokens: NonNegativeInt = key(
        0,
        "The same for background requests, such as those of batches, since another prompt may have"
        " to wait for the step; 0 chooses by device: 64, or 2,048 on a GPU.",
    )
    gpu_share: Share = key(
        1.0,
        "Share of a GPU's multiprocessors that one worker uses. Set it below 1 if both pools share"
        " a GPU: the rest stays free for decode (docs/PERFORMANCE.md).",
        "--gpu-share",
    )


@dataclass(frozen=True, slots=True)
class DecodeConfig(PoolConfig):
    """The decode pool."""

    workers: WorkerCount = key(1, "Decode workers.", "--decode")
    max_batch: NonNegativeInt = key(
        0, "Requests in one step; 0 chooses by device: 64, or 256 on a GPU.", "--max-batch"
    )
    background_batch: NonNegativeInt = key(
        0,
        "The same for background requests, such as those of batches, since another request may have"
        " to wait for the step; 0 chooses by device: 16, or 256 on a GPU.",
    )
    chunk_tokens: NonNegativeInt = key(
        0,
        "Prompt tokens in one step (local prefill, and requests that lost their pages); 0 chooses"
        " by device: 256, or 2,048 on a GPU.",
    )
    nice: Niceness = key(
        19,
        "On a CPU: niceness of decode's threads. If both pools share cores, prefill then runs at"
        " full speed, and decode in larger batches.",
    )
    ticket_seconds: PositiveFloat = key(600.0, "Seconds that reserved pages wait for a prompt.")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The second tier, for pages evicted from a pool (budgets are per worker), and the response
    cache, for whole answers in routers or Redis (docs/RESPONSE_CACHE.md)."""

    host_memory: Bytes = key(Size(0), "Host memory. On a CPU a larger `kv_memory` is better.")
    files: str = key("", "A folder for files, which outlive the worker; empty writes none.")
    files_budget: Bytes = key(Size(16 * 2**30), "Maximum bytes of these files.")
    responses: Literal["off", "exact", "semantic"] = key(
        "off",
        "exact: answer a repeated greedy or seeded request from its earlier answer; semantic: also"
        " from the answer to a similar question, if the caller allows it (needs `redis` and"
        " `embedding_model`).",
    )
    responses_memory: Bytes = key(Size(2**28), "Maximum bytes of answers in one router's memory.")
    responses_seconds: PositiveFloat = key(3600.0, "Age up to which an answer is reused.")
    semantic: Literal["answer", "shadow"] = key(
        "answer",
        "shadow: compute every answer, and record what the semantic cache would have answered"
        " (`baton cache report`).",
    )
    semantic_similarity: Share = key(
        0.95,
        "Minimum cosine similarity of two questions that may share an answer. Callers may only"
        " raise it.",
    )
    semantic_questions: PositiveInt = key(
        100_000, "Questions of one tenant; the least recently used one is dropped."
    )
    semantic_verify_seconds: NonNegativeFloat = key(
        0.0,
        "Seconds for the served model to confirm, with one token, that a similar question asks the"
        " same; without a yes in this time its answer is not used. A first token waits no longer."
        " 0: never ask.",
    )
    redis: str = key("", "A redis:// or rediss:// URL: routers share answers there, not in memory.")
    redis_key: str = key("", "A file with a secret of 32 bytes or more that encrypts them there.")


@dataclass(frozen=True, slots=True)
class BatchesConfig:
    """Files and batches (`/v1/files`, `/v1/batches`)."""

    folder: str = key(
        "",
        "A folder for files and batches, which outlive the router; routers may share one. Empty"
        " serves none.",
        "--batches",
    )
    budget: Bytes = key(
        Size(16 * 2**30), "Maximum bytes of these files; beyond, uploads are refused."
    )
    keep_seconds: PositiveFloat = key(
        30 * 86400.0, "Seconds after which a file, or a batch that has ended, is deleted."
    )
    max_requests: PositiveInt = key(
        256, "Requests of batches that run at once, if workers have room."
    )


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Certificates for clients and among the cluster's processes (core/tls.py)."""

    folder: str = key("", "A folder of certificates (`baton certs`); empty uses no TLS.", "--tls")
    client_certificates: bool = key(
        False, "Require certificates from clients.", "--client-certificates"
    )


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """The controller, which reports workers to routers, under Ray."""

    port: Port = key(0, "0 chooses a free port; routers outside Ray need a fixed one.")


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """The planner, which adapts the pools to the load, under Ray."""

    enabled: bool = key(False, "Adapt the pools to the load; see `baton plan`.", "--plan")
    act: bool = key(True, "Carry decisions out, instead of only reporting them.")
    ttft: PositiveFloat = key(4.0, "Objective: seconds to the first token.")
    itl: PositiveFloat = key(0.05, "Objective: seconds between two tokens.")
    most_workers: NonNegativeInt = key(
        0, "Workers of both pools together; 0 allows as many as the cluster starts with."
    )
    least_prefill: PositiveInt = key(1, "Prefill workers to keep without load.")
    least_decode: PositiveInt = key(1, "Decode workers to keep without load.")
    round_seconds: PositiveFloat = key(
        10.0, "Seconds between two decisions. Each looks at the last six rounds."
    )


@dataclass(frozen=True, slots=True)
class MembersConfig:
    """A fixed membership, for a router without a controller."""

    workers: tuple[str, ...] = key((), "Addresses of workers.")
