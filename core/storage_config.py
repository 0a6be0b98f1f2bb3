"""The sections of a configuration about what is kept: caches, and files of batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton.core.config_values import (
    Bytes,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Share,
    Size,
    key,
)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The second tier, pages that were evicted from a pool (budgets are one worker's), and the
    response cache, whole answers in routers or Redis (docs/RESPONSE_CACHE.md)."""

    host_memory: Bytes = key(Size(0), "Host memory. On a CPU a larger `kv_memory` is better.")
    files: str = key("", "A folder for files, which outlive the worker; empty writes none.")
    files_budget: Bytes = key(Size(16 * 2**30), "Most bytes of these files.")
    responses: Literal["off", "exact", "semantic"] = key(
        "off",
        "exact: answer a greedy or seeded request that was answered before from its answer;"
        " semantic: also from the answer to a similar question, where the caller allows it, which"
        " needs `redis` and `embedding_model`.",
    )
    responses_memory: Bytes = key(Size(2**28), "Most bytes of answers in one router's memory.")
    responses_seconds: PositiveFloat = key(3600.0, "Age up to which an answer is given again.")
    semantic: Literal["answer", "shadow"] = key(
        "answer",
        "shadow: compute every answer, and record what the semantic cache would have answered"
        " (`baton cache report`).",
    )
    semantic_similarity: Share = key(
        0.95, "Least cosine similarity of two questions with one answer. Callers may only raise it."
    )
    semantic_questions: PositiveInt = key(
        100_000, "Questions of one tenant; the one that was used longest ago is forgotten."
    )
    semantic_verify_seconds: NonNegativeFloat = key(
        0.0,
        "Ask the served model, for one token, whether a similar question asks the same; without a"
        " yes in this time its answer is not given. A first token waits no longer. 0: never ask.",
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
    budget: Bytes = key(Size(16 * 2**30), "Most bytes of these files; then uploads are refused.")
    keep_seconds: PositiveFloat = key(
        30 * 86400.0, "Seconds after which a file, or a batch that has ended, is deleted."
    )
    max_requests: PositiveInt = key(
        256, "Requests of batches that run at once, where workers have room for so many."
    )
