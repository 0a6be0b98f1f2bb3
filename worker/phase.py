"""A phase: prefill or decode, run on top of an engine by a worker's engine thread.

All methods run on the engine thread, one at a time, and none of them blocks.
This package imports neither phase, so `phase_factory` finds their classes by name.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

from baton.core import bounds
from baton.core.bounds import MAX_GRAMMAR, MAX_TOP_LOGPROBS
from baton.core.config import Config
from baton.core.errors import (
    Internal,
    InvalidGrammar,
    InvalidRequest,
    PromptTooLong,
    TokenOutOfRange,
    Unavailable,
)
from baton.core.types import AttemptKey, Role, Work
from baton.core.wire import failed_to
from baton.engine.engine import Engine
from baton.kv_transfer.transfer_events import PagesDamaged, TransferCrashed, TransferEvent
from baton.kv_transfer.transfer_thread import TransferThread
from baton.v1 import worker_pb2 as pb
from baton.worker.metrics import WorkerMetrics
from baton.worker.outbox import Outbox
from baton.worker.step_pipeline import StepPipeline


class Scheduler(Protocol):
    @property
    def waiting(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def queued_tokens(self) -> int: ...


class _Attached(Protocol):
    attachment: int


AnyJob = TypeVar("AnyJob", bound=_Attached)


class Phase(ABC, Generic[AnyJob]):
    """Holds one job per attempt."""

    role: ClassVar[Role]

    def __init__(
        self,
        engine: Engine,
        transfer: TransferThread,
        outbox: Outbox,
        metrics: WorkerMetrics,
        config: Config,
    ) -> None:
        self._engine = engine
        self._pool = engine.pool
        self._transfer = transfer
        self._outbox = outbox
        self._metrics = metrics
        self._steps = StepPipeline(engine, metrics)
        self._quarantine_share = config.quarantine_share
        self._draining = False
        self._jobs: dict[AttemptKey, AnyJob] = {}

    @abstractmethod
    def on_message(self, attachment: int, message: pb.RouterMessage, arrived: float) -> None:
        """Handles a router's message that arrived at `arrived`, by the monotonic clock."""

    def on_detach(self, attachment: int) -> None:
        """Releases everything that a disconnected router's requests hold."""
        for key in [key for key, job in self._jobs.items() if job.attachment == attachment]:
            self._release(key)

    def on_transfer(self, event: TransferEvent) -> None:
        """Handles an event of the transfer thread."""
        match event:
            case PagesDamaged():
                self._metrics.damaged(event.count)
            case TransferCrashed():
                raise Internal(f"the transfer thread stopped: {event.reason}")
            case _:
                self._on_transfer(event)

    @abstractmethod
    def step(self) -> bool:
        """Runs one step of the engine. False when there is nothing to run."""

    @abstractmethod
    def load(self) -> pb.Load:
        """How busy the phase and its pool are."""

    def drain(self) -> None:
        """Refuses new requests from now on; routers retry them on another worker."""
        self._draining = True

    def resume(self) -> None:
        """Accepts new requests again."""
        self._draining = False

    @abstractmethod
    def hand_back(self) -> None:
        """Fails every request; routers retry them on another worker."""

    @property
    def idle(self) -> bool:
        """Whether there are no requests."""
        return not self._jobs

    @property
    @abstractmethod
    def settled(self) -> bool:
        """Whether there are no requests, no in-flight steps and no transfers of any page."""

    @abstractmethod
    def _on_transfer(self, event: TransferEvent) -> None: ...

    @abstractmethod
    def _release(self, key: AttemptKey) -> None:
        """Ends an attempt, if it is known, and frees its pages once that is safe."""

    @property
    @abstractmethod
    def _quarantined(self) -> int:
        """Pages that a remote write uses or may reach for too long."""

    def _check(self, work: Work, most_tokens: int) -> None:
        """Raises why the work, which may grow to `most_tokens`, cannot be accepted."""
        if self._draining:
            raise self._drained()
        if fault := self._quarantine_fault(self._quarantined):
            raise Unavailable(fault)
        check_work(work, self._engine.architecture.vocabulary_size)
        if most_tokens > self._engine.context_length:
            raise PromptTooLong(
                f"the request may reach {most_tokens} tokens; this worker's context holds"
                f" {self._engine.context_length}",
                field="prompt",
            )

    def _drained(self) -> Unavailable:
        return Unavailable(f"the {self.role.value} worker is being drained")

    def _refuse(self, attachment: int, work: pb.Work) -> None:
        """Fails a request for the other role, from a router that does not know of the role
        switch yet."""
        error = Unavailable(f"the worker's role has changed to {self.role.value}")
        key = AttemptKey(work.request_id, work.epoch)
        self._outbox.send(attachment, failed_to(key, error))

    def _measure_load(self, scheduler: Scheduler, held: int, transfers: int) -> pb.Load:
        """The load report, also written to the metrics. `held` pages belong to no request."""
        busy, quarantined = self._jobs or self._steps.any, self._quarantined
        leak = "" if busy else self._pool.check_integrity(held=held)
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


AnyPhase = Phase[Any]
PhaseFactory = Callable[[Engine, TransferThread, Outbox, WorkerMetrics, Config], AnyPhase]

_CLASSES = {
    Role.PREFILL: ("baton.prefill_worker.prefill_phase", "PrefillPhase"),
    Role.DECODE: ("baton.decode_worker.decode_phase", "DecodePhase"),
}


def phase_factory(role: Role) -> PhaseFactory:
    module, name = _CLASSES[role]
    return cast(PhaseFactory, getattr(importlib.import_module(module), name))


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
