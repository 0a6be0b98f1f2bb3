"""The configuration: frozen, typed, read once.

One YAML file describes a cluster, and every process of it may be given the
same file. Flags override single values by their dotted path. An unknown key,
a wrong type or a value out of range raises InvalidConfig and names the key.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton.core.config_tree import Size as Size
from baton.core.config_tree import build, plain, read_yaml, set_dotted
from baton.core.types import Role

GPU_MEMORY = 0.9
"""The share of its GPU's memory that a worker takes unless told otherwise."""


def _positive(value: float) -> str:
    return "" if value > 0 else "must be above 0"


def _not_negative(value: float) -> str:
    return "" if value >= 0 else "must be 0 or more"


def _share(value: float) -> str:
    return "" if 0 < value <= 1 else "must be above 0 and at most 1"


def _share_or_none(value: float) -> str:
    return "" if 0 <= value <= 1 else "must be from 0 to 1"


def _port(value: int) -> str:
    return "" if 0 <= value <= 65535 else "must be a port, 0 to 65535"


def _niceness(value: int) -> str:
    return "" if 0 <= value <= 19 else "must be from 0 to 19"


def _one_of(*names: str) -> typing.Callable[[str], str]:
    return lambda value: "" if value in names else f"must be one of {', '.join(names)}"


def _ray_resources(value: Mapping[str, float]) -> str:
    """Of those that Ray would refuse only when a worker is made."""
    if named := value.keys() & {"CPU", "GPU", "memory", "object_store_memory"}:
        return f"must not name {min(named)}, which Ray counts by itself; GPUs are in `gpus`"
    if too_little := [name for name, amount in value.items() if amount < 1e-4]:
        return f"must have 0.0001 or more of {too_little[0]}"
    return ""


def _checked(default: object, check: typing.Callable[[typing.Any], str]) -> typing.Any:
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The front door."""

    # Under `baton serve`: the ports of each further one are one more.
    count: int = _checked(1, _positive)
    host: str = "127.0.0.1"
    port: int = _checked(50051, _port)
    http_port: int = _checked(8000, _port)
    metrics_port: int = _checked(9400, _port)
    # A file of API keys (`baton keys add`); empty asks nobody for one.
    keys: str = ""
    # Where there are keys: whether metrics can be had without one. If not, the
    # metrics port is open to this machine alone.
    open_metrics: bool = False
    # Requests under way at once, waiting or not; further ones are refused.
    max_requests: int = _checked(1024, _positive)
    # Of these, how many may wait for a worker with room, and for how long each.
    max_queued: int = _checked(512, _positive)
    queue_timeout: float = _checked(600.0, _positive)
    # Requests that one worker is sent before it has begun, or promised pages to, those before.
    worker_backlog: int = _checked(16, _positive)
    # How long a request waits for workers when there are none.
    placement_timeout: float = _checked(30.0, _positive)
    # Attempts of one request that may end in a worker's death; then it fails.
    max_worker_deaths: int = _checked(2, _positive)
    # Attempts of one request in all.
    max_attempts: int = _checked(8, _positive)
    # How workers are chosen: by predicted time, which knows what they have
    # cached, by load alone, or in turn.
    policy: str = _checked("kv_aware", _one_of("kv_aware", "least_loaded", "round_robin"))
    # When decode workers read prompts themselves: "auto" when that is predicted
    # to take less, and when no prefill worker has been there for some seconds;
    # "fallback" only then; "never", or "always".
    local_prefill: str = _checked("auto", _one_of("auto", "fallback", "never", "always"))
    local_prefill_after: float = _checked(2.0, _not_negative)
    # When a prefill worker fetches what a decode worker holds of a prompt and it does not: "auto"
    # when that is predicted to take less than computing it; "never", or "always".
    fetch_pages: str = _checked("auto", _one_of("auto", "never", "always"))
    # From placement to token #1.
    first_token_timeout: float = _checked(600.0, _positive)
    # Between two tokens.
    stall_timeout: float = _checked(120.0, _positive)
    # Tokens that may wait for a client which does not read; then it is cut off.
    reader_buffer: int = _checked(4096, _positive)
    # Workers are asked this often whether they are there, and count as lost
    # when nothing has come from them for `frozen_seconds`, or when their engine
    # has work and has not reported for `engine_stall_seconds`.
    ping_seconds: float = _checked(0.5, _positive)
    frozen_seconds: float = _checked(3.0, _positive)
    engine_stall_seconds: float = _checked(60.0, _positive)
    # An idle worker makes one token this often, to show that it can; 0 never.
    canary_seconds: float = _checked(30.0, _not_negative)
    # Where traces of requests go (OTLP over HTTP), such as http://127.0.0.1:4318; empty nowhere.
    otlp_endpoint: str = ""
    # Threads that tokenize and render templates.
    text_threads: int = _checked(2, _positive)
    # How the model writes tool calls; "auto" is as its chat template shows it.
    tool_format: str = _checked(
        "auto", _one_of("auto", "hermes", "llama3", "mistral", "mistral-args")
    )
    # Whether what the model thinks (<think>…</think>) is parted from what it
    # says; "auto" is as its chat template shows it.
    reasoning: str = _checked("auto", _one_of("auto", "on", "off"))


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """The pool that reads prompts."""

    workers: int = _checked(1, _positive)
    host: str = "127.0.0.1"
    # 0 takes a free port; processes started one by one want a fixed one.
    port: int = _checked(0, _port)
    # Memory for pages; 0 chooses by device: 1 GiB, or on a GPU all that
    # `gpu_memory` leaves.
    kv_memory: Size = _checked(Size(0), _not_negative)
    # Prompt tokens computed in one step; 0 chooses by device: 512, or 8,192 on a GPU.
    chunk_tokens: int = _checked(0, _not_negative)
    # CPU threads of one worker; unset takes all cores.
    threads: int | None = _checked(None, _positive)
    # GPUs of one worker; unset takes one for each of its processes where the cluster has any.
    gpus: float | None = None
    # What else a worker takes of a Ray node, such as {baton_prefill: 1}: it is placed only where
    # there is so much of it left.
    resources: Mapping[str, float] = field(default_factory=dict, metadata={"check": _ray_resources})
    # Processes that share a worker's model, each with some heads; on GPUs each has one of its
    # own, of one node. Pools may differ.
    tensor_parallel: int = _checked(1, _positive)
    # The share of a GPU's multiprocessors that one worker computes on. Below 1 where
    # both pools share a GPU: the rest is always free for decode (docs/PERFORMANCE.md).
    gpu_share: float = _checked(1.0, _share)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """The pool that writes answers."""

    workers: int = _checked(1, _positive)
    host: str = "127.0.0.1"
    port: int = _checked(0, _port)
    kv_memory: Size = _checked(Size(0), _not_negative)
    # Requests in one step; 0 chooses by device: 64, or 256 on a GPU.
    max_batch: int = _checked(0, _not_negative)
    # Tokens recomputed in one step for requests that lost their pages; 0
    # chooses by device: 256, or 2,048 on a GPU.
    chunk_tokens: int = _checked(0, _not_negative)
    # On a CPU: how far decode's threads stand back for other processes, 0 to 19.
    # Where both pools share cores, prompts then run at full speed, and answers
    # are written together rather than a few at a time.
    nice: int = _checked(19, _niceness)
    # How long reserved pages wait for a prompt to arrive.
    ticket_seconds: float = _checked(600.0, _positive)
    threads: int | None = _checked(None, _positive)
    gpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict, metadata={"check": _ray_resources})
    tensor_parallel: int = _checked(1, _positive)


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Certificates (core/tls.py): for clients, and among the cluster's own processes."""

    # A folder as `baton certs` makes it; empty speaks in the clear.
    folder: str = ""
    # Whether clients must show a certificate.
    client_certificates: bool = False


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Where pages go that have no room in a pool any more; a budget is one worker's."""

    # Memory of the host. 0, the default, takes none: on a CPU, a larger
    # `kv_memory` does the same and better.
    host_memory: Size = _checked(Size(0), _not_negative)
    # A folder for files, which a worker that is started again finds; none when empty.
    files: str = ""
    files_budget: Size = _checked(Size(16 * 2**30), _not_negative)


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """Who tells routers which workers there are, under Ray."""

    # 0 takes a free port; routers outside Ray, which follow it, want a fixed one.
    port: int = _checked(0, _port)


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Who changes the pools by what is asked of them, under Ray."""

    enabled: bool = False
    # Whether it does what it decides, or only tells.
    act: bool = True
    # The objectives: seconds to the first token, and between two tokens.
    ttft: float = _checked(4.0, _positive)
    itl: float = _checked(0.05, _positive)
    # Workers of both pools together; 0 allows no more than the cluster is started with.
    most_workers: int = _checked(0, _not_negative)
    # Workers of each pool that are kept, however little is asked of them.
    least_prefill: int = _checked(1, _positive)
    least_decode: int = _checked(1, _positive)
    # Between two decisions. Each looks at the last six rounds.
    round_seconds: float = _checked(10.0, _positive)


@dataclass(frozen=True, slots=True)
class MembersConfig:
    """Addresses of workers, for a router that no controller tells."""

    workers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Config:
    """A whole cluster."""

    # "embedded", or a Hugging Face folder.
    model: str = "embedded"
    # The name that clients use; empty takes the folder's.
    model_name: str = ""
    dtype: str = _checked("auto", _one_of("auto", "float32", "bfloat16", "float16"))
    device: str = _checked("auto", _one_of("auto", "cpu", "cuda"))
    # How pages travel between workers; "auto" takes CUDA IPC within a host of
    # GPUs, and NIXL elsewhere.
    transport: str = _checked("auto", _one_of("auto", "nixl", "cuda_ipc"))
    # The share of a GPU's memory that one worker takes for weights, pages and work; 0 takes 0.9,
    # or where Ray gives it a part of a GPU, 0.9 of that part.
    gpu_memory: float = _checked(0.0, _share_or_none)
    # Whether the processes of one worker (`tensor_parallel`) may share a GPU where it sees too
    # few. For tests: what they exchange then goes through host memory, and is slow.
    ranks_share_gpus: bool = False
    # "files", or "random" for a worker that is only measured: of the model's
    # folder it then needs no weights.
    weights: str = _checked("files", _one_of("files", "random"))
    # Tokens a page of K/V.
    page_size: int = _checked(16, _positive)
    # Whether workers keep the pages of prompts and answers for those that begin alike.
    prefix_cache: bool = True
    # A shorter context than the model's.
    max_context: int | None = _checked(None, _positive)
    # How long a process that is told to stop lets its requests run on. Those of
    # a worker then go on elsewhere.
    drain_seconds: float = _checked(20.0, _not_negative)
    # The largest share of a pool that may wait in quarantine for writes of lost
    # peers; with more, a worker takes nothing new.
    quarantine_share: float = _checked(0.5, _share)
    # A digest of each page, made where the page is and checked where it arrives;
    # "auto" is on where pools are in CPU memory.
    page_digests: str = _checked("auto", _one_of("auto", "on", "off"))
    # Whether other machines may reach a router without keys, or workers without TLS.
    insecure: bool = False
    log_level: str = _checked("info", _one_of("debug", "info", "warning", "error"))
    tls: TlsConfig = TlsConfig()
    router: RouterConfig = RouterConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    cache: CacheConfig = CacheConfig()
    controller: ControllerConfig = ControllerConfig()
    planner: PlannerConfig = PlannerConfig()
    members: MembersConfig = MembersConfig()

    def pool(self, role: Role) -> PrefillConfig | DecodeConfig:
        """The section of a role's workers."""
        return self.prefill if role is Role.PREFILL else self.decode


def settle(config: Config, device: str) -> Config:
    """`config` with every value that is to be chosen by device chosen for "cpu" or "cuda"."""
    gpu = device == "cuda"
    memory = Size(0 if gpu else 2**30)
    prefill, decode = config.prefill, config.decode
    return dataclasses.replace(
        config,
        gpu_memory=config.gpu_memory or GPU_MEMORY,
        prefill=dataclasses.replace(
            prefill,
            kv_memory=prefill.kv_memory or memory,
            chunk_tokens=prefill.chunk_tokens or (8192 if gpu else 512),
        ),
        decode=dataclasses.replace(
            decode,
            kv_memory=decode.kv_memory or memory,
            max_batch=decode.max_batch or (256 if gpu else 64),
            chunk_tokens=decode.chunk_tokens or (2048 if gpu else 256),
        ),
    )


def load(path: Path | None, overrides: Mapping[str, object] | None = None) -> Config:
    """The configuration in `path` (the defaults when None), with dotted `overrides` on top."""
    tree = read_yaml(path) if path else {}
    for dotted, value in (overrides or {}).items():
        set_dotted(tree, dotted, value)
    return parse(tree)


def parse(tree: Mapping[str, object]) -> Config:
    """The configuration that a parsed YAML document describes."""
    return typing.cast(Config, build(Config, tree, ""))


def dump(config: Config) -> dict[str, object]:
    """`config` as plain values that `parse` reads back."""
    return typing.cast(dict[str, object], plain(dataclasses.asdict(config)))
