"""Estimates how long prompts, transfers and steps take in this cluster, from measurements.

Workers report the times of prompts and pushes, and the router sees the time between two steps of
an answer. `CostModel` fits these; `Costs` is its estimate at one moment, a plain value that the
policy uses. Until something is measured, priors apply: the orders of magnitude of a large model on
a GPU, which only say that more work takes longer.

bench/ablation.py measures what each part contributes. Pure: no I/O, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy

from baton.core.online_fit import InterferenceShare, OnlineFit
from baton.core.types import Role

# Coefficients in seconds, for the features named at the end of the line.
BUSY_SHARE = 0.01  # a busy prefill worker on the same hardware, as a share of a token's own time
TRANSFER_PRIOR = (1e-3, 1e-11)  # a push, a byte: optimistic, since what looks slow is not tried
EXPOSED_PRIOR = (1e-3, 1.0)  # a push, a second of transfer beyond what compute can hide
STEP_PRIOR = (1e-2, 1e-4, 1e-7, 1e-4)  # a step, a request, a page, a busy prefill worker
INTERFERENCE_PRIOR = 0.01
ANSWER_PRIOR = 128.0

REQUEST_MEMORY = 64.0
STEP_MEMORY = 256.0
FADING_MEMORY = 256.0
ANSWER_RATE = 0.05

KNOWN_AFTER = 32
"""Numbers of answers and of step reports from which on predictions of answers are used: a worker's
first steps are slow, and a few answers are no average."""


class PromptCosts(NamedTuple):
    """Coefficients for the seconds that a prompt takes to prefill."""

    once: float
    token: float
    attended: float  # a token times one that it attends to
    queued: float  # a token queued before it
    restored: float  # a cached token in the second tier
    beside: float = 0.0  # a token of a local prefill times a busy prefill worker

    def seconds(
        self, tokens: int, prefix: int, pending: int = 0, restored: int = 0, busy_prefill: int = 0
    ) -> float:
        """Predicts `tokens` tokens after `prefix` cached ones, of which `restored` are restored,
        behind `pending` queued tokens and next to `busy_prefill` busy prefill workers."""
        once, token, attended, queued, restore, beside = self
        own = tokens * (token + beside * busy_prefill + attended * (prefix + tokens / 2))
        return own + (once + queued * pending + restore * restored)

    def wait(self, pending: int, restored: int = 0) -> float:
        """The part of `seconds` that is not the prompt's own compute."""
        return self.queued * pending + self.restored * restored

    def as_local(self) -> PromptCosts:
        """Estimates local prefill from prefill workers."""
        return self._replace(beside=BUSY_SHARE * self.token)


PREFILL_PRIOR = PromptCosts(5e-3, 1e-4, 3e-9, 1e-4, 5e-6)
LOCAL_PRIOR = PREFILL_PRIOR.as_local()


def larger(one: float, other: float) -> float:
    """Returns the larger number; by element if the first is an array."""
    if isinstance(one, numpy.ndarray):
        return numpy.maximum(one, other)
    return one if one > other else other


@dataclass(frozen=True, slots=True)
class Costs:
    """Estimates, in seconds. Formulas are plain arithmetic, so that they take arrays too."""

    prefill: PromptCosts = PREFILL_PRIOR
    # Prefill on a decode worker, between the steps of its other requests.
    local: PromptCosts = LOCAL_PRIOR
    transfer: tuple[float, ...] = TRANSFER_PRIOR
    exposed: tuple[float, ...] = EXPOSED_PRIOR
    # A fetch, a byte: like a push after the holder's current step.
    fetch: tuple[float, ...] = (TRANSFER_PRIOR[0] + STEP_PRIOR[0], TRANSFER_PRIOR[1])
    step: tuple[float, ...] = STEP_PRIOR
    # Seconds that a second of a prefill worker's compute adds to each decoding request.
    interfered: float = INTERFERENCE_PRIOR
    answer_tokens: float = ANSWER_PRIOR
    # Enough answers and steps were measured to predict answers.
    knows_answers: bool = False

    def transfer_seconds(self, size: int) -> float:
        """Predicts a push of `size` bytes, from its first write to the end of its last."""
        once, each = self.transfer
        return (once + each * size) * (size > 0)

    def exposed_seconds(self, transfer_seconds: float, compute_seconds: float) -> float:
        """Predicts the time from the end of a prompt's compute to the arrival of its last page."""
        once, each = self.exposed
        return once + each * larger(transfer_seconds - compute_seconds, 0.0)

    def fetch_seconds(self, size: int) -> float:
        """Predicts a fetch of `size` bytes, from its request to the last page's arrival."""
        once, each = self.fetch
        return once + each * size

    def step_seconds(self, requests: int, pages: int) -> float:
        """Predicts a step of a decode worker, without interference."""
        once, request, page, _ = self.step
        return once + request * requests + page * pages

    def decode_seconds(self, tokens: int, requests: int, pages: int, own_pages: int) -> float:
        """Predicts the answer's steps among `requests` with `pages`, plus the time that it adds to
        theirs."""
        _, request, page, _ = self.step
        # What the answer adds to each step.
        added = request + page * own_pages
        steps = self.step_seconds(requests, pages) + added + added * requests
        return min(tokens, self.answer_tokens) * steps

    def room_seconds(self, waiting: int, requests: int, pages: int) -> float:
        """Predicts the seconds until `waiting` requests have run: each ended answer admits one."""
        one_answer = self.answer_tokens * self.step_seconds(requests, pages)
        return waiting * one_answer / (requests + (requests == 0))

    def interference(self, decoding: int, prefilling: int = 0) -> float:
        """Predicts what a second of compute on a prefill worker adds to requests on decode workers:
        `decoding` ones on workers that only decode, `prefilling` ones on workers that also prefill.
        Close to 0 if the pools share no hardware."""
        slower = self.local.beside
        return decoding * self.interfered + prefilling * slower / (self.local.token + slower)


class CostModel:
    def __init__(self) -> None:
        # By role, once measured. A single one also serves as the other's estimate.
        self._prompts: dict[Role, OnlineFit] = {}
        # By role, the prompts that the other role has computed since its last measurement.
        self._ages = dict.fromkeys(Role, 0)
        self._transfer = OnlineFit(TRANSFER_PRIOR, REQUEST_MEMORY)
        # Two separate fits, for pushes that compute hides and for those that exceed it.
        self._hidden = OnlineFit(EXPOSED_PRIOR[:1], REQUEST_MEMORY)
        self._beyond = OnlineFit(EXPOSED_PRIOR[1:], REQUEST_MEMORY)
        self._fetch: OnlineFit | None = None
        self._step = OnlineFit(STEP_PRIOR, STEP_MEMORY)
        self._interference = InterferenceShare(INTERFERENCE_PRIOR)
        self._answers = self._steps = 0
        self._answer_tokens = ANSWER_PRIOR
        self._costs: Costs | None = None

    @property
    def costs(self) -> Costs:
        if self._costs is None:
            self._costs = self._estimate()
        return self._costs

    @property
    def knows_prompts(self) -> bool:
        """True once any prompt was measured."""
        return bool(self._prompts)

    def note_prompt(
        self,
        role: Role,
        tokens: int,
        prefix: int,
        pending: int,
        seconds: float,
        restored: int = 0,
        busy_prefill: float = 0.0,
    ) -> None:
        """Learns from a prompt that took `seconds` on a worker of the role since its arrival:
        `tokens` tokens after `prefix` cached ones, of which `restored` were restored, behind
        `pending` queued ones; in local prefill, next to a mean of `busy_prefill` busy prefill
        workers."""
        # A token attends to all before it: the prefix, and on average half of the others.
        attended = tokens * (prefix + tokens / 2)
        features = [1.0, tokens, attended, pending, restored]
        if role is Role.DECODE:
            features.append(tokens * busy_prefill)
        if role not in self._prompts:
            prior = self.costs.prefill if role is Role.PREFILL else self.costs.local
            self._prompts[role] = OnlineFit(prior[: len(features)], REQUEST_MEMORY)
        self._ages = {each: 0 if each is role else age + 1 for each, age in self._ages.items()}
        self._note(self._prompts[role], features, seconds)

    def note_push(self, size: int, seconds: float, exposed: float, compute_seconds: float) -> None:
        """Learns from a push of `size` bytes that took `seconds`, `exposed` of them after the
        compute."""
        if size:
            self._note(self._transfer, (1.0, float(size)), seconds)
        beyond = self.costs.transfer_seconds(size) - compute_seconds
        if beyond > 0:
            once = self.costs.exposed[0]
            self._note(self._beyond, (beyond,), max(0.0, exposed - once))
        else:
            self._note(self._hidden, (1.0,), exposed)

    def note_fetch(self, size: int, seconds: float) -> None:
        """Learns from a fetch of `size` bytes, complete or given up."""
        if self._fetch is None:
            self._fetch = OnlineFit(self.costs.fetch, REQUEST_MEMORY)
        self._note(self._fetch, (1.0, float(size)), seconds)

    def note_step(
        self, requests: int, pages: int, busy_prefill: float, seconds: float, steps: int = 1
    ) -> None:
        """Learns from `steps` steps of a decode worker of `seconds` each, with a mean of
        `busy_prefill` busy prefill workers."""
        self._steps += 1
        self._note(self._step, (1.0, float(requests), float(pages), busy_prefill), seconds)
        alone = self.costs.step_seconds(requests, pages)
        self._interference.note(busy_prefill * seconds * steps, (seconds - alone) * steps)
        self._costs = None

    def note_answer(self, tokens: int) -> None:
        """Learns from an answer's length."""
        self._answers += 1
        rate = max(ANSWER_RATE, 1.0 / self._answers)
        self._answer_tokens += rate * (tokens - self._answer_tokens)
        self._costs = None

    def _note(self, fit: OnlineFit, features: Sequence[float], seconds: float) -> None:
        fit.note(features, seconds)
        self._costs = None

    def _estimate(self) -> Costs:
        transfer, step = self._transfer.coefficients, self._step.coefficients
        fetch = (transfer[0] + step[0], transfer[1])
        prefill, local = self._estimate_prompts()
        return Costs(
            prefill=prefill,
            local=local,
            transfer=transfer,
            exposed=self._hidden.coefficients + self._beyond.coefficients,
            fetch=self._fetch.coefficients if self._fetch else fetch,
            step=step,
            interfered=self._interference.share,
            answer_tokens=self._answer_tokens,
            knows_answers=min(self._answers, self._steps) >= KNOWN_AFTER,
        )

    def _estimate_prompts(self) -> tuple[PromptCosts, PromptCosts]:
        """Estimates prompts on prefill and on decode workers. A stale estimate decays toward the
        other role's, so that its workers are tried again."""
        known = {role: PromptCosts(*fit.coefficients) for role, fit in self._prompts.items()}
        prefill, local = known.get(Role.PREFILL), known.get(Role.DECODE)
        if prefill is None or local is None:
            prefill = prefill or (local or PREFILL_PRIOR)._replace(beside=0.0)
            return prefill, local or prefill.as_local()
        return (
            _decayed(prefill, local._replace(beside=0.0), self._ages[Role.PREFILL]),
            _decayed(local, prefill._replace(beside=local.beside), self._ages[Role.DECODE]),
        )


def _decayed(own: PromptCosts, other: PromptCosts, age: int) -> PromptCosts:
    keep = math.exp(-age / FADING_MEMORY)
    return PromptCosts(*(keep * a + (1.0 - keep) * b for a, b in zip(own, other, strict=True)))
