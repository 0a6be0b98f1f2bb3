"""The tree of errors, and its table of gRPC codes and HTTP statuses.

    BatonError
    ├── InvalidRequest           the caller must change the request
    │   ├── PromptTooLong
    │   ├── TokenOutOfRange
    │   ├── InvalidSampling
    │   ├── InvalidGrammar       the requested structure cannot be compiled
    │   ├── UnknownModel
    │   ├── UnknownRequest       no such request, or too long ago
    │   └── NotServed            a feature that this server has not
    ├── Unauthenticated          no API key, or an unknown one
    ├── PermissionDenied         the API key does not allow this
    ├── RoleRefused              a worker's role cannot be switched so
    ├── InvalidConfig            the operator must change the configuration
    │   ├── UnsupportedModel
    │   ├── InvalidCheckpoint
    │   └── ModelNotFound
    ├── Exhausted                retry later, or request less
    │   └── SlowReader           the caller did not receive its answer
    ├── Unavailable              no worker is available now
    │   ├── WorkerLost
    │   └── LayoutMismatch
    ├── DeadlineExceeded         a timeout
    ├── Cancelled                the caller disconnected
    └── Internal                 a bug
        └── PoisonRequest        the request crashed several workers

An error's `reason` is stable and sent on the wire; its message is for people. `from_reason`
rebuilds the error.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple


class BatonError(Exception):
    """Any error of Baton. `field` names the offending input, if any.

    `retry_after` is the seconds to wait before a retry that may help; else 0.
    """

    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, field: str = "", retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after = retry_after


class InvalidRequest(BatonError):
    reason = "INVALID_REQUEST"


class PromptTooLong(InvalidRequest):
    reason = "PROMPT_TOO_LONG"


class TokenOutOfRange(InvalidRequest):
    reason = "TOKEN_OUT_OF_RANGE"


class InvalidSampling(InvalidRequest):
    reason = "INVALID_SAMPLING"


class InvalidGrammar(InvalidRequest):
    reason = "INVALID_GRAMMAR"


class UnknownModel(InvalidRequest):
    reason = "UNKNOWN_MODEL"


class UnknownRequest(InvalidRequest):
    reason = "UNKNOWN_REQUEST"


class NotServed(InvalidRequest):
    reason = "NOT_SERVED"


class Unauthenticated(BatonError):
    reason = "UNAUTHENTICATED"


class PermissionDenied(BatonError):
    reason = "PERMISSION_DENIED"


class RoleRefused(BatonError):
    reason = "ROLE_REFUSED"


class InvalidConfig(BatonError):
    reason = "INVALID_CONFIG"


class UnsupportedModel(InvalidConfig):
    reason = "UNSUPPORTED_MODEL"


class InvalidCheckpoint(InvalidConfig):
    reason = "INVALID_CHECKPOINT"


class ModelNotFound(InvalidConfig):
    reason = "MODEL_NOT_FOUND"


class Exhausted(BatonError):
    reason = "EXHAUSTED"


class SlowReader(Exhausted):
    reason = "SLOW_READER"


class Unavailable(BatonError):
    reason = "UNAVAILABLE"


class WorkerLost(Unavailable):
    reason = "WORKER_LOST"


class LayoutMismatch(Unavailable):
    reason = "LAYOUT_MISMATCH"


class DeadlineExceeded(BatonError):
    reason = "DEADLINE_EXCEEDED"


class Cancelled(BatonError):
    reason = "CANCELLED"


class Internal(BatonError):
    reason = "INTERNAL"


class PoisonRequest(Internal):
    reason = "POISON_REQUEST"


class Translation(NamedTuple):
    grpc: str  # the name of a grpc.StatusCode
    http: int


TRANSLATIONS: dict[type[BatonError], Translation] = {
    UnknownModel: Translation("NOT_FOUND", 404),
    UnknownRequest: Translation("NOT_FOUND", 404),
    InvalidRequest: Translation("INVALID_ARGUMENT", 400),
    Unauthenticated: Translation("UNAUTHENTICATED", 401),
    PermissionDenied: Translation("PERMISSION_DENIED", 403),
    RoleRefused: Translation("FAILED_PRECONDITION", 409),
    InvalidConfig: Translation("FAILED_PRECONDITION", 500),
    Exhausted: Translation("RESOURCE_EXHAUSTED", 429),
    LayoutMismatch: Translation("FAILED_PRECONDITION", 503),
    Unavailable: Translation("UNAVAILABLE", 503),
    DeadlineExceeded: Translation("DEADLINE_EXCEEDED", 504),
    Cancelled: Translation("CANCELLED", 499),
    BatonError: Translation("INTERNAL", 500),
}


def translation(error: BatonError) -> Translation:
    """The gRPC code and HTTP status of the error's class, or of its nearest ancestor."""
    return next(TRANSLATIONS[cls] for cls in type(error).__mro__ if cls in TRANSLATIONS)


def _tree(cls: type[BatonError]) -> list[type[BatonError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _tree(child))]


_BY_REASON = {cls.reason: cls for cls in _tree(BatonError)}


def from_reason(
    reason: str, message: str, *, field: str = "", retry_after: float = 0.0
) -> BatonError:
    """The error of a `reason`; Internal for an unknown one."""
    return _BY_REASON.get(reason, Internal)(message, field=field, retry_after=retry_after)
