"""Conversions between core values and protobuf messages."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from baton.core.errors import BatonError, InvalidRequest, Unavailable, from_reason
from baton.core.types import (
    Adapter,
    AttemptKey,
    FinishReason,
    Logprobs,
    Pooling,
    Role,
    Sampling,
    Work,
)
from baton.v1 import inference_pb2
from baton.v1 import worker_pb2 as pb

_FINISH: dict[FinishReason | None, inference_pb2.FinishReason.ValueType] = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.TOOL_CALLS: inference_pb2.FINISH_REASON_TOOL_CALLS,
}
_FINISH_BACK = {value: reason for reason, value in _FINISH.items()}
_ROLE = {Role.PREFILL: pb.ROLE_PREFILL, Role.DECODE: pb.ROLE_DECODE}
_ROLE_BACK = {value: role for role, value in _ROLE.items()}
_NESTED = ("logit_bias", "bad_words_ids")
_LISTS = ("suppress_tokens", "begin_suppress_tokens")
_SAMPLING_FIELDS = [
    each.name for each in fields(Sampling) if each.init and each.name not in _NESTED
]


def work_to(work: Work) -> pb.Work:
    return pb.Work(
        request_id=work.key.request_id,
        epoch=work.key.epoch,
        prompt_tokens=work.prompt_tokens,
        sampling=_sampling_to(work.sampling),
        max_tokens=work.max_tokens,
        stop_token_ids=sorted(work.stop_token_ids),
        answer_tokens=work.answer_tokens,
        cache_salt=work.cache_salt,
        logprobs=work.logprobs,
        grammar=work.grammar,
        prompt_logprobs=work.prompt_logprobs,
        prediction=work.prediction,
        priority=work.priority,
        alone=work.alone,
        adapter=adapter_to(work.adapter) if work.adapter else None,
        pooling=inference_pb2.Pooling.ValueType(work.pooling.value if work.pooling else 0),
        retain_seconds=work.retain_seconds,
    )


def work_from(message: pb.Work) -> Work:
    return Work(
        key=AttemptKey(message.request_id, message.epoch),
        prompt_tokens=list(message.prompt_tokens),
        sampling=_sampling_from(message.sampling),
        max_tokens=message.max_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        answer_tokens=message.answer_tokens,
        cache_salt=message.cache_salt,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        grammar=message.grammar,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        prediction=tuple(message.prediction),
        priority=message.priority,
        alone=message.alone,
        adapter=adapter_from(message.adapter) if message.HasField("adapter") else None,
        pooling=_pooling_from(message.pooling),
        retain_seconds=message.retain_seconds,
    )


def _pooling_from(value: int) -> Pooling | None:
    try:
        return Pooling(value) if value else None
    except ValueError:
        raise InvalidRequest(f"pooling {value} is unknown", field="pooling") from None


def adapter_to(adapter: Adapter) -> pb.Adapter:
    return pb.Adapter(digest=adapter.digest, folder=adapter.folder, sources=adapter.sources)


def adapter_from(message: pb.Adapter) -> Adapter:
    return Adapter(message.digest, message.folder, tuple(message.sources))


def _sampling_to(sampling: Sampling) -> pb.Sampling:
    values: dict[str, Any] = {name: getattr(sampling, name) for name in _SAMPLING_FIELDS}
    words = [inference_pb2.TokenIds(ids=word) for word in sampling.bad_words_ids]
    return pb.Sampling(logit_bias=dict(sampling.logit_bias), bad_words_ids=words, **values)


def _sampling_from(message: pb.Sampling) -> Sampling:
    values: dict[str, Any] = {name: getattr(message, name) for name in _SAMPLING_FIELDS}
    return Sampling(
        **values | {name: tuple(values[name]) for name in _LISTS},
        logit_bias=tuple(sorted(message.logit_bias.items())),
        bad_words_ids=tuple(tuple(word.ids) for word in message.bad_words_ids),
    )


def logprobs_to(logprobs: Logprobs) -> pb.Logprobs:
    return pb.Logprobs(
        logprob=logprobs.logprob,
        top_token_ids=logprobs.top_token_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def logprobs_from(message: pb.Logprobs) -> Logprobs:
    return Logprobs(message.logprob, tuple(message.top_token_ids), tuple(message.top_logprobs))


def finish_to(reason: FinishReason | None) -> inference_pb2.FinishReason.ValueType:
    return _FINISH[reason]


def finish_from(value: inference_pb2.FinishReason.ValueType) -> FinishReason | None:
    return _FINISH_BACK[value]


def role_to(role: Role) -> pb.Role.ValueType:
    return _ROLE[role]


def is_role(value: int) -> bool:
    """True if the wire's value is a known role."""
    return value in _ROLE_BACK


def role_from(value: pb.Role.ValueType) -> Role:
    return _ROLE_BACK[value]


def failed_to(key: AttemptKey, error: BatonError, *, retry: bool = False) -> pb.WorkerMessage:
    """`retry` marks the request as not at fault, whatever the error's type."""
    return pb.WorkerMessage(
        failed=pb.Failed(
            request_id=key.request_id,
            epoch=key.epoch,
            reason=error.reason,
            message=error.message,
            retry=retry or isinstance(error, Unavailable),
        )
    )


def failed_from(message: pb.Failed) -> BatonError:
    return from_reason(message.reason, message.message)
