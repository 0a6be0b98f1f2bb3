"""What a worker checks of every request, whoever sent it.

A router checks more, and for people; this keeps a mistaken one from harming
the engine and with it everybody's requests.
"""

from __future__ import annotations

from baton.core import bounds
from baton.core.bounds import MAX_GRAMMAR, MAX_TOP_LOGPROBS
from baton.core.errors import (
    InvalidGrammar,
    InvalidRequest,
    PromptTooLong,
    TokenOutOfRange,
    Unavailable,
)
from baton.core.types import AttemptKey, Role, Work
from baton.core.wire import failed_to
from baton.v1 import worker_pb2 as pb


def quarantine_fault(quarantined: int, total: int, share: float) -> str:
    """Why a worker takes nothing new; empty when it does.

    Pages that a remote write may still reach cannot be used. More than `share`
    of the pool waiting for the other side means that something is badly wrong
    there, and that little would fit in here.
    """
    if quarantined <= share * total:
        return ""
    return f"{quarantined} of {total} pages are in quarantine, more than {share:.0%}"


def refusal(work: pb.Work, role: Role) -> pb.WorkerMessage:
    """The answer to a request for the other role, sent before its router heard of a change."""
    error = Unavailable(f"the worker's role has changed: it does {role.value} now")
    return failed_to(AttemptKey(work.request_id, work.epoch), error)


def check_work(work: Work, vocabulary_size: int) -> None:
    """Raises what is wrong with the request; returns when the engine can run it."""
    if not work.prompt_tokens:
        raise InvalidRequest("the prompt is empty", field="prompt")
    if max(work.prompt_tokens) >= vocabulary_size:
        raise TokenOutOfRange(
            f"token id {max(work.prompt_tokens)} is outside the vocabulary of {vocabulary_size}",
            field="token_ids",
        )
    if work.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", field="max_tokens")
    if work.answer_tokens >= min(len(work.prompt_tokens), work.max_tokens):
        raise InvalidRequest("the answer is longer than what it belongs to", field="answer_tokens")
    if max(work.logprobs or 0, work.prompt_logprobs or 0) > MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"logprobs must be at most {MAX_TOP_LOGPROBS}", field="logprobs")
    if len(work.grammar) > MAX_GRAMMAR:
        raise InvalidGrammar(f"a grammar has at most {MAX_GRAMMAR} characters", field="grammar")
    biased = max(dict(work.sampling.logit_bias), default=0)
    if biased >= vocabulary_size:
        raise TokenOutOfRange(
            f"logit_bias names token {biased}, outside the vocabulary of {vocabulary_size}",
            field="logit_bias",
        )
    bounds.checked(work.sampling)


def check_context(tokens: int, context_length: int) -> None:
    """Raises when a request may grow beyond what the engine can hold of one."""
    if tokens > context_length:
        raise PromptTooLong(
            f"the request may reach {tokens} tokens; this worker's context holds {context_length}",
            field="prompt",
        )
