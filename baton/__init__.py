"""What a user imports.

    from baton import Client

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=64).text)

`AsyncClient` is the same for asyncio. Whatever goes wrong is a `BatonError`.
"""

from baton.aio import AsyncClient, AsyncStream
from baton.answers import Answer, Delta, Usage
from baton.client import Client, Stream
from core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Exhausted,
    Internal,
    InvalidConfig,
    InvalidRequest,
    InvalidSampling,
    LayoutMismatch,
    ModelNotFound,
    PromptTooLong,
    TokenOutOfRange,
    Unavailable,
    UnknownModel,
    UnsupportedModel,
    WorkerLost,
)
from core.types import FinishReason, Message

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "BatonError",
    "Cancelled",
    "Client",
    "DeadlineExceeded",
    "Delta",
    "Exhausted",
    "FinishReason",
    "Internal",
    "InvalidConfig",
    "InvalidRequest",
    "InvalidSampling",
    "LayoutMismatch",
    "Message",
    "ModelNotFound",
    "PromptTooLong",
    "Stream",
    "TokenOutOfRange",
    "Unavailable",
    "UnknownModel",
    "UnsupportedModel",
    "Usage",
    "WorkerLost",
]
