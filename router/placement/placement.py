"""The policy's input and output: snapshots and placements. Plain values."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from baton.core.page_reach import Window, first_kept
from baton.core.types import Role
from baton.router.placement.cost_model import Costs, larger


class Suspicion(enum.Enum):
    """How likely a request is to be the one that crashes its workers."""

    NONE = enum.auto()
    SUSPECT = enum.auto()  # it has lost a worker
    ALONE = enum.auto()  # it has lost several: no other suspect may run there


class Strategy(enum.StrEnum):
    """How workers are compared. The values are those of the configuration."""

    KV_AWARE = "kv_aware"
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"


class LocalPrefill(enum.StrEnum):
    """When decode workers prefill prompts themselves. The values are those of the configuration."""

    AUTO = "auto"  # if that is predicted to take less time, or if no prefill worker can
    FALLBACK = "fallback"  # if no prefill worker can
    NEVER = "never"
    ALWAYS = "always"


class FetchPages(enum.StrEnum):
    """When prefill workers fetch pages that decode workers hold. The values are those of the
    configuration."""

    AUTO = "auto"  # if that is predicted to take less time than computing them
    NEVER = "never"
    ALWAYS = "always"


class Policy(enum.StrEnum):
    """How a request's work is divided. Clients see the values."""

    SPLIT = "split"
    LOCAL = "local"
    PREFILL = "prefill"


class Reason(enum.StrEnum):
    """Why a placement was chosen. Clients see the values, and the texts."""

    text: str

    CACHED = "cached", "a prefix of the prompt is cached there"
    CACHE_BUSY = "cache_busy", "workers with a longer cached prefix would take longer"
    FETCHED = "fetched", "a prefix of the prompt is fetched from another worker"
    LEAST_TIME = "least_time", "the least predicted time"
    LEAST_LOADED = "least_loaded", "least loaded"
    ROUND_ROBIN = "round_robin", "next in turn"
    ONE_TOKEN = "one_token", "one token is wanted"
    LOCAL_FASTER = "local_faster", "predicted to take less than prefill and transfer"
    LOCAL_ONLY = "local_only", "decode workers are configured to prefill all prompts"
    NO_PREFILL = "no_prefill", "no prefill worker can prefill it"
    RETRY = "retry", "an earlier attempt failed"
    CANARY = "canary", "a test of the worker"

    def __new__(cls, value: str, text: str) -> Reason:
        made = str.__new__(cls, value)
        made._value_, made.text = value, text
        return made


Column = Sequence[int] | NDArray[numpy.int64]
"""A number for each worker of a pool: a list, or an array for many workers."""

MANY_WORKERS = 20
"""With this many workers or more, arrays are faster than lists."""


def columns_of(rows: Sequence[tuple[int, ...]]) -> Sequence[Column]:
    """Transposes rows, one for each worker."""
    if len(rows) < MANY_WORKERS:
        return [list(column) for column in zip(*rows, strict=True)]
    return list(numpy.array(rows, dtype=numpy.int64).T)


def column_of(values: NDArray[numpy.int64]) -> Column:
    """Returns the array, or a list for few workers, which is faster."""
    return values.tolist() if len(values) < MANY_WORKERS else values


@dataclass(slots=True)
class PrefillColumns:
    """The usable prefill workers, as the router sees them for one request."""

    worker_ids: Sequence[str] = ()
    # The decode workers that each can push to.
    reaches: Sequence[frozenset[str]] = ()
    # Prompt tokens that wait there.
    pending_tokens: Column = ()
    # 1 if it may be sent this request, else 0.
    has_room: Column = ()
    # Leading tokens of this prompt that it has cached, and how many of them it must restore from
    # the second tier.
    cached_tokens: Column = ()
    saved_tokens: Column = ()
    # 1 if it must load the request's adapter, else 0; empty without an adapter.
    lacks_adapter: Column = ()


@dataclass(slots=True)
class DecodeColumns:
    """The usable decode workers, as the router sees them for one request."""

    worker_ids: Sequence[str] = ()
    # Requests there, running or waiting.
    requests: Column = ()
    free_pages: Column = ()
    # 1 if it may be sent this request, else 0: its backlog is limited.
    has_room: Column = ()
    cached_tokens: Column = ()
    # Requests being decoded, and those that wait for pages or a place in the batch. The others
    # are being prefilled or on their way.
    running: Column = ()
    waiting: Column = ()
    leased_pages: Column = ()
    # Prompt tokens that wait for local prefill.
    pending_tokens: Column = ()
    saved_tokens: Column = ()
    # Requests in local prefill.
    prefilling: Column = ()
    lacks_adapter: Column = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The cluster and the request, as input of one choice."""

    prefill: PrefillColumns = field(default_factory=PrefillColumns)
    decode: DecodeColumns = field(default_factory=DecodeColumns)
    # Why pairs of attached workers cannot exchange pages; none if all can.
    mismatches: Sequence[str] = ()
    # By role, the workers that are left out since they fail their health checks.
    faults: Mapping[Role, Sequence[str]] = field(default_factory=dict)
    # Decode workers may prefill now if no prefill worker can.
    local_prefill: bool = False
    # The configured use of local prefill.
    local: LocalPrefill = LocalPrefill.FALLBACK
    fetch: FetchPages = FetchPages.AUTO
    strategy: Strategy = Strategy.KV_AWARE
    costs: Costs = field(default_factory=Costs)
    # Counts placements, so that equal workers take turns.
    turn: int = 0
    prompt_tokens: int = 1
    tokens_wanted: int = 1
    page_size: int = 16
    page_bytes: int = 0
    windows: tuple[Window, ...] = (None,)  # the window of each slice of the layers

    def pages_after(self, tokens: int, cached: Any) -> Any:
        """Returns the pages that a worker lacks of a prompt's first `tokens` tokens if it has the
        first `cached` ones. `cached` may be an array."""
        pages, size = -(-tokens // self.page_size), self.page_size
        firsts = (first_kept(window, tokens, size) for window in self.windows)
        return sum(pages - larger(cached // size, first) for first in firsts)


class FetchPlan(NamedTuple):
    """Pages that the prefill worker is to fetch before it computes the rest."""

    holder: str  # the decode worker that holds them
    pages: int  # leading pages of the prompt that it holds
    tokens: int  # tokens of these pages that the prefill worker lacks
    seconds: float  # time limit of the fetch: the predicted saving


@dataclass(frozen=True, slots=True)
class Forecast:
    """The prediction that a placement was chosen by."""

    first_token_seconds: float  # from the placement on
    pending_tokens: int  # prompt tokens queued before this prompt
    cached_tokens: int  # of this prompt


@dataclass(frozen=True, slots=True)
class Placement:
    prefill: str  # empty for local prefill
    decode: str  # empty if one token is wanted
    # An explanation beyond the code's, or empty.
    reason: str = ""
    code: Reason = Reason.LEAST_TIME
    forecast: Forecast | None = field(default=None, compare=False)
    fetch: FetchPlan | None = None

    @property
    def policy(self) -> Policy:
        if not self.prefill:
            return Policy.LOCAL
        return Policy.SPLIT if self.decode else Policy.PREFILL

    @property
    def explanation(self) -> str:
        return self.reason or self.code.text
