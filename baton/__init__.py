"""What a user imports.

    from baton import Client

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=64).text)

`AsyncClient` is the same for asyncio. Whatever goes wrong is a `BatonError`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from baton.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Exhausted,
    Internal,
    InvalidConfig,
    InvalidGrammar,
    InvalidRequest,
    InvalidSampling,
    LayoutMismatch,
    ModelNotFound,
    PermissionDenied,
    PoisonRequest,
    PromptTooLong,
    RoleRefused,
    SlowReader,
    TokenOutOfRange,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    UnknownRequest,
    UnsupportedModel,
    WorkerLost,
)
from baton.core.types import FinishReason, Message, Tool, ToolCall

if TYPE_CHECKING:
    from baton.async_client import AsyncClient, AsyncStream
    from baton.client import Client, Stream
    from baton.responses import (
        Answer,
        Choice,
        Delta,
        Placement,
        TokenLogprob,
        TokenLogprobs,
        Usage,
    )

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "BatonError",
    "Cancelled",
    "Choice",
    "Client",
    "DeadlineExceeded",
    "Delta",
    "Exhausted",
    "FinishReason",
    "Internal",
    "InvalidConfig",
    "InvalidGrammar",
    "InvalidRequest",
    "InvalidSampling",
    "LayoutMismatch",
    "Message",
    "ModelNotFound",
    "PermissionDenied",
    "Placement",
    "PoisonRequest",
    "PromptTooLong",
    "RoleRefused",
    "SlowReader",
    "Stream",
    "TokenLogprob",
    "TokenLogprobs",
    "TokenOutOfRange",
    "Tool",
    "ToolCall",
    "Unauthenticated",
    "Unavailable",
    "UnknownModel",
    "UnknownRequest",
    "UnsupportedModel",
    "Usage",
    "WorkerLost",
]

# Found at first use: every process imports baton.v1, and only clients need grpc for it.
_HOMES = {
    "AsyncClient": "baton.async_client",
    "AsyncStream": "baton.async_client",
    "Answer": "baton.responses",
    "Choice": "baton.responses",
    "Delta": "baton.responses",
    "Placement": "baton.responses",
    "TokenLogprob": "baton.responses",
    "TokenLogprobs": "baton.responses",
    "Usage": "baton.responses",
    "Client": "baton.client",
    "Stream": "baton.client",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
