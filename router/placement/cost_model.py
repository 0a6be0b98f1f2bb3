"""How long things take in this cluster, learned from how long they took.

Workers report how long each prompt and each push took, and the router sees the time between two
steps of an answer. `CostModel` fits these; `Costs` is its estimate at one moment, a plain value
that the policy decides on. Until something is measured, priors apply: the orders of magnitude of
a large model on a GPU, which only say that more work takes longer.

What each part contributes is measured by bench/ablation.py. Pure: no I/O, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy

from baton.core.online_fit import InterferenceShare, OnlineFit
from baton.core.types import Role

# Coefficients in seconds, for the features named beside them.
BUSY_SHARE = 0.01  # of a token's own time, what a busy prefill worker on the same hardware adds
TRANSFER_PRIOR = (1e-3, 1e-11)  # a push, a byte: as within a host, for what looks slow is not tried
EXPOSED_PRIOR = (1e-3, 1.0)  # a push, a second of transfer beyond what compute can hide
STEP_PRIOR = (1e-2, 1e-4, 1e-7, 1e-4)  # a step, a request, a page, a busy prefill worker
INTERFERENCE_PRIOR = 0.01
ANSWER_PRIOR = 128.0

REQUEST_MEMORY = 64.0
STEP_MEMORY = 256.0
FADING_MEMORY = 256.0
ANSWER_RATE = 0.05

KNOWN_AFTER = 32
"""Answers, and reports of steps, after which neither the first, slow steps of a worker nor a few
answers decide how long another takes."""


class PromptCosts(NamedTuple):
    """Seconds that a prompt takes to prefill."""

    once: float
    token: float
    look: float  # a token times one that it attends to
    queued: float  # a token queued before it
    restored: float  # a cached token in the second tier
    beside: float = 0.0  # a token of a local prefill times a busy prefill worker

    def seconds(
        self, tokens: int, prefix: int, pending: int = 0, restored: int = 0, busy_prefill: int = 0
    ) -> float:
        """A worker computes `pending` tokens and then `tokens`, which follow `prefix` cached ones,
        of which it restores `restored`, beside `busy_prefill` prefill workers."""
        once, token, look, queued, back, beside = self
        own = tokens * (token + beside * busy_prefill + look * (prefix + tokens / 2))
        return own + (once + queued * pending + back * restored)

    def wait(self, pending: int, restored: int = 0) -> float:
        """The part of this that is not the prompt's own compute."""
        return self.queued * pending + self.restored * restored

    def as_local(self) -> PromptCosts:
        """Local prefill, estimated from prefill workers."""
        return self._replace(beside=BUSY_SHARE * self.token)


PREFILL_PRIOR = PromptCosts(5e-3, 1e-4, 3e-9, 1e-4, 5e-6)
LOCAL_PRIOR = PREFILL_PRIOR.as_local()


def larger(one: float, other: float) -> float:
    """The larger of two numbers; by element where the first is an array."""
    if isinstance(one, numpy.ndarray):
        return numpy.maximum(one, other)
    return one if one > other else other


@dataclass(frozen=True, slots=True)
class Costs:
    """Estimates, in seconds. Formulas are plain arithmetic, so that they take arrays too."""

    prefill: PromptCosts = PREFILL_PRIOR
    # On a decode worker, between the steps of its other requests.
    local: PromptCosts = LOCAL_PRIOR
    transfer: tuple[float, ...] = TRANSFER_PRIOR
    exposed: tuple[float, ...] = EXPOSED_PRIOR
    # A fetch, a byte: as a push, after the holder's current step.
    fetch: tuple[float, ...] = (TRANSFER_PRIOR[0] + STEP_PRIOR[0], TRANSFER_PRIOR[1])
    step: tuple[float, ...] = STEP_PRIOR
    # What a second of a prefill worker's compute adds to the time of each decoding request.
    interfered: float = INTERFERENCE_PRIOR
    answer_tokens: float = ANSWER_PRIOR
    # Whether that was measured here.
    knows_answers: bool = False

    def transfer_seconds(self, size: int) -> float:
        """A push of `size` bytes, from its first write to its last."""
        once, each = self.transfer
        return (once + each * size) * (size > 0)

    def exposed_seconds(self, transfer_seconds: float, compute_seconds: float) -> float:
        """From the end of a prompt's compute to the arrival of its last page."""
        once, each = self.exposed
        return once + each * larger(transfer_seconds - compute_seconds, 0.0)

    def fetch_seconds(self, size: int) -> float:
        """From the request for `size` bytes of another worker's pages to their arrival."""
        once, each = self.fetch
        return once + each * size

    def step_seconds(self, requests: int, pages: int) -> float:
        """A step of a decode worker, without interference."""
        once, request, page, _ = self.step
        return once + request * requests + page * pages

    def decode_seconds(self, tokens: int, requests: int, pages: int, own_pages: int) -> float:
        """The answer's own steps beside `requests` with `pages`, and what it adds to theirs."""
        _, request, page, _ = self.step
        # What the answer adds to a step, for itself and for each of the others.
        added = request + page * own_pages
        steps = self.step_seconds(requests, pages) + added + added * requests
        return min(tokens, self.answer_tokens) * steps

    def room_seconds(self, waiting: int, requests: int, pages: int) -> float:
        """Seconds until `waiting` requests have room: each answer that ends leaves one place."""
        one_answer = self.answer_tokens * self.step_seconds(requests, pages)
        return waiting * one_answer / (requests + (requests == 0))

    def interference(self, decoding: int, prefilling: int = 0) -> float:
        """Seconds that a second of compute on a prefill worker adds to requests on decode workers:
        `decoding` on those that only decode, `prefilling` on those that prefill too. 0 where the
        pools share no hardware."""
        slower = self.local.beside
        return decoding * self.interfered + prefilling * slower / (self.local.token + slower)


class CostModel:
    def __init__(self) -> None:
        # Once measured; the first of the two also serves as the other's estimate.
        self._prompts: dict[Role, OnlineFit] = {}
        # Prompts that the other role has computed since each was measured last.
        self._ages = dict.fromkeys(Role, 0)
        self._transfer = OnlineFit(TRANSFER_PRIOR, REQUEST_MEMORY)
        # Two fits: how often a push is late says nothing about how late one is.
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
        """Whether its estimates of prompts are measured here."""
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
        """A prompt's `seconds` on a worker of the role from its arrival: `tokens` behind `prefix`
        cached ones, of which `restored` were restored, with `pending` ones queued before it, and
        for a local prefill `busy_prefill` busy prefill workers on average."""
        # A token attends to all before it: the prefix, and half of the others on average.
        looks = tokens * (prefix + tokens / 2)
        features = [1.0, tokens, looks, pending, restored]
        if role is Role.DECODE:
            features.append(tokens * busy_prefill)
        if role not in self._prompts:
            prior = self.costs.prefill if role is Role.PREFILL else self.costs.local
            self._prompts[role] = OnlineFit(prior[: len(features)], REQUEST_MEMORY)
        self._ages = {each: 0 if each is role else age + 1 for each, age in self._ages.items()}
        self._note(self._prompts[role], features, seconds)

    def note_push(self, size: int, seconds: float, exposed: float, compute_seconds: float) -> None:
        """A push of `size` bytes took `seconds`, `exposed` of them after the compute."""
        if size:
            self._note(self._transfer, (1.0, float(size)), seconds)
        beyond = self.costs.transfer_seconds(size) - compute_seconds
        if beyond > 0:
            once = self.costs.exposed[0]
            self._note(self._beyond, (beyond,), max(0.0, exposed - once))
        else:
            self._note(self._hidden, (1.0,), exposed)

    def note_fetch(self, size: int, seconds: float) -> None:
        """Pages of `size` bytes were fetched, or did not come in time."""
        if self._fetch is None:
            self._fetch = OnlineFit(self.costs.fetch, REQUEST_MEMORY)
        self._note(self._fetch, (1.0, float(size)), seconds)

    def note_step(
        self, requests: int, pages: int, busy_prefill: float, seconds: float, steps: int = 1
    ) -> None:
        """`steps` steps of a decode worker of `seconds` each, with `busy_prefill` busy prefill
        workers on average."""
        self._steps += 1
        self._note(self._step, (1.0, float(requests), float(pages), busy_prefill), seconds)
        alone = self.costs.step_seconds(requests, pages)
        self._interference.note(busy_prefill * seconds * steps, (seconds - alone) * steps)
        self._costs = None

    def note_answer(self, tokens: int) -> None:
        """An answer has ended."""
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
        """Estimates for prefill and for decode workers. A stale one decays toward the other role's,
        so that it is tried again."""
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
