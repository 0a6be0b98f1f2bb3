"""The tree of errors, with their gRPC codes and HTTP statuses.

    BatonError
    ├── InvalidRequest           the caller must change the request
    │   ├── PromptTooLong
    │   ├── TokenOutOfRange
    │   ├── InvalidSampling
    │   ├── InvalidGrammar       the requested structure cannot be compiled
    │   ├── UnknownModel
    │   ├── InvalidAdapter       a LoRA adapter that cannot be served
    │   ├── UnknownRequest       no such request, or too long ago
    │   └── NotServed            a feature that this server lacks
    ├── Unauthenticated          no API key, or an unknown one
    ├── PermissionDenied         the API key does not allow this
    ├── RoleRefused              this switch of a worker's role is not possible
    ├── InvalidConfig            the operator must change the configuration
    │   ├── UnsupportedModel
    │   ├── InvalidCheckpoint
    │   └── ModelNotFound
    ├── Exhausted                retry later, or request less
    │   ├── RateLimited          the API key's limit is reached
    │   └── SlowReader           the caller did not receive its answer
    ├── Unavailable              no worker is available now
    │   ├── WorkerLost
    │   ├── WorkerDrained        a draining worker returns the request, which is not at fault
    │   ├── QuarantineFull       the worker accepts nothing new; the request is not at fault
    │   └── LayoutMismatch
    ├── NotCached                only a cached answer was wanted, and there is none
    ├── DeadlineExceeded         a timeout
    ├── Cancelled                the caller disconnected
    └── Internal                 a bug
        └── PoisonRequest        the request crashed several workers

An error's `reason`, made from its name, is stable and sent on the wire; its message is for people.
`from_reason` rebuilds the error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar

_BY_REASON: dict[str, type[BatonError]] = {}


class BatonError(Exception):
    """Any error of Baton. `field` names the offending input, if any.

    `retry_after` is the seconds to wait before a retry that may help; else 0.
    """

    reason: ClassVar[str] = "INTERNAL"
    grpc_code: ClassVar[str] = "INTERNAL"  # the name of a grpc.StatusCode
    http_status: ClassVar[int] = 500

    def __init_subclass__(cls, grpc_code: str = "", http_status: int = 0) -> None:
        """Both default to the parent's. The reason of PromptTooLong is PROMPT_TOO_LONG."""
        cls.reason = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).upper()
        cls.grpc_code = grpc_code or cls.grpc_code
        cls.http_status = http_status or cls.http_status
        _BY_REASON[cls.reason] = cls

    def __init__(self, message: str, *, field: str = "", retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after = retry_after


class InvalidRequest(BatonError, grpc_code="INVALID_ARGUMENT", http_status=400): ...


class PromptTooLong(InvalidRequest): ...


class TokenOutOfRange(InvalidRequest): ...


class InvalidSampling(InvalidRequest): ...


class InvalidGrammar(InvalidRequest): ...


class UnknownModel(InvalidRequest, grpc_code="NOT_FOUND", http_status=404): ...


def describe_unknown(name: str, served: Iterable[str]) -> str:
    """The message for a name, possibly empty, that no model has."""
    names = ", ".join(map(repr, served))
    if not name:
        return f"several models are served; name one: {names}"
    return f"there is no model {name!r} here; this cluster serves {names}"


class InvalidAdapter(InvalidRequest): ...


class AdapterMissing(InvalidAdapter): ...


class UnknownRequest(InvalidRequest, grpc_code="NOT_FOUND", http_status=404): ...


class NotServed(InvalidRequest): ...


class Unauthenticated(BatonError, grpc_code="UNAUTHENTICATED", http_status=401): ...


class PermissionDenied(BatonError, grpc_code="PERMISSION_DENIED", http_status=403): ...


class RoleRefused(BatonError, grpc_code="FAILED_PRECONDITION", http_status=409): ...


class InvalidConfig(BatonError, grpc_code="FAILED_PRECONDITION", http_status=500): ...


class UnsupportedModel(InvalidConfig): ...


class InvalidCheckpoint(InvalidConfig): ...


class ModelNotFound(InvalidConfig): ...


class Exhausted(BatonError, grpc_code="RESOURCE_EXHAUSTED", http_status=429): ...


class RateLimited(Exhausted): ...


class SlowReader(Exhausted): ...


class Unavailable(BatonError, grpc_code="UNAVAILABLE", http_status=503): ...


class WorkerLost(Unavailable): ...


class WorkerDrained(Unavailable): ...


class QuarantineFull(Unavailable): ...


class LayoutMismatch(Unavailable, grpc_code="FAILED_PRECONDITION", http_status=503): ...


class NotCached(BatonError, grpc_code="NOT_FOUND", http_status=504): ...


class DeadlineExceeded(BatonError, grpc_code="DEADLINE_EXCEEDED", http_status=504): ...


class Cancelled(BatonError, grpc_code="CANCELLED", http_status=499): ...


class Internal(BatonError): ...


class PoisonRequest(Internal): ...


def from_reason(
    reason: str, message: str, *, field: str = "", retry_after: float = 0.0
) -> BatonError:
    """Rebuilds the error of a `reason`; Internal if the reason is unknown."""
    return _BY_REASON.get(reason, Internal)(message, field=field, retry_after=retry_after)
