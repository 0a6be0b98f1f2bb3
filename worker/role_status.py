"""What both phases share: request checks, draining, and the load report."""

from __future__ import annotations

from typing import Protocol

from baton.core import bounds
from baton.core.bounds import MAX_GRAMMAR, MAX_TOP_LOGPROBS
from baton.core.config import Config
from baton.core.errors import (
    InvalidGrammar,
    InvalidRequest,
    PromptTooLong,
    TokenOutOfRange,
    Unavailable,
)
from baton.core.types import AttemptKey, Role, Work
from baton.core.wire import failed_to
from baton.engine.engine import Engine
from baton.v1 import worker_pb2 as pb
from baton.worker.metrics import WorkerMetrics


class Scheduler(Protocol):
    @property
    def waiting(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def queued_tokens(self) -> int: ...


class RoleStatus:
    """Whether a worker accepts requests in its role, and how busy it is."""

    def __init__(self, role: Role, engine: Engine, metrics: WorkerMetrics, config: Config) -> None:
        self.draining = False
        self._role = role
        self._engine = engine
        self._pool = engine.pool
        self._metrics = metrics
        self._quarantine_share = config.quarantine_share

    def check(self, work: Work, most_tokens: int, quarantined: int) -> None:
        """Raises why the work, which may grow to `most_tokens`, cannot be accepted."""
        if self.draining:
            raise self.drained()
        if fault := self._quarantine_fault(quarantined):
            raise Unavailable(fault)
        check_work(work, self._engine.architecture.vocabulary_size)
        if most_tokens > self._engine.context_length:
            raise PromptTooLong(
                f"the request may reach {most_tokens} tokens; this worker's context holds"
                f" {self._engine.context_length}",
                field="prompt",
            )

    def drained(self) -> Unavailable:
        return Unavailable(f"the {self._role.value} worker is being drained")

    def refusal(self, work: pb.Work) -> pb.WorkerMessage:
        """The answer to a request for the other role, sent by a router that does not yet know of
        the role switch."""
        error = Unavailable(f"the worker's role has changed to {self._role.value}")
        return failed_to(AttemptKey(work.request_id, work.epoch), error)

    def load(self, scheduler: Scheduler, quarantined: int, transfers: int, leak: str) -> pb.Load:
        """The load report for routers, also written to the metrics. `leak` is the pool's
        integrity error."""
        load = pb.Load(
            free_pages=self._pool.free,
            leased_pages=self._pool.leased - quarantined,
            quarantined_pages=quarantined,
            cached_pages=self._pool.cached,
            kept_pages=self._pool.kept,
            waiting=scheduler.waiting,
            running=scheduler.running,
            queued_tokens=scheduler.queued_tokens,
            fault=leak or self._quarantine_fault(quarantined),
            transfers=transfers,
        )
        self._metrics.load(load)
        self._metrics.cache(self._pool)
        return load

    def _quarantine_fault(self, quarantined: int) -> str:
        """Why the worker accepts nothing new; empty when it does.

        Pages that a remote write may still reach cannot be used. When they exceed the configured
        share of the pool, something is badly wrong with the peers, and little would fit.
        """
        share, total = self._quarantine_share, self._pool.total
        if quarantined <= share * total:
            return ""
        return f"{quarantined} of {total} pages are in quarantine, more than {share:.0%}"


def check_work(work: Work, vocabulary_size: int) -> None:
    """Raises what is wrong with the work; returns when the engine can run it.

    A router checks more, for users; this protects the engine from a faulty router.
    """
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
        raise InvalidRequest(
            "answer_tokens must be less than the prompt's length and max_tokens",
            field="answer_tokens",
        )
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
