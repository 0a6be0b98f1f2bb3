"""The public Python API.

    from baton import Client

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=64).text)

`AsyncClient` is the same for asyncio. All errors are `BatonError`s.
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
    InvalidAdapter,
    InvalidConfig,
    InvalidGrammar,
    InvalidRequest,
    InvalidSampling,
    LayoutMismatch,
    ModelNotFound,
    PermissionDenied,
    PoisonRequest,
    PromptTooLong,
    RateLimited,
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
    from baton.client import AsyncClient, AsyncStream, Client, Stream
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
    "InvalidAdapter",
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
    "RateLimited",
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


def __getattr__(name: str) -> object:
    # Imported at first use: server processes import baton.v1 alone, and need no client.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "baton.client" if name.endswith(("Client", "Stream")) else "baton.responses"
    return getattr(importlib.import_module(module), name)
