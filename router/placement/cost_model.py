"""How long things take in this cluster, learned from how long they took.

Workers report how long each prompt and each push took, and the router sees the time between two
steps of an answer. `CostModel` fits these; `Costs` is its estimate at one moment, a plain value
that the policy decides on. Until something is measured, priors apply: the orders of magnitude of
a large model on a GPU, which only say that more work takes longer.

What each part contributes is measured by bench/ablation.py. Pure: no I/O, no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy

from baton.router.placement.online_fit import InterferenceShare, OnlineFit

# Coefficients in seconds, for the features named beside them.
# A prompt, a token, a token times one that it attends to, a queued token, a restored token.
PREFILL_PRIOR = (5e-3, 1e-4, 3e-9, 1e-4, 5e-6)
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


def _as_local(prefill: tuple[float, ...]) -> tuple[float, ...]:
    """Local prefill, estimated from prefill workers."""
    return (*prefill, BUSY_SHARE * prefill[1])


def larger(one: float, other: float) -> float:
    """The larger of two numbers; by element where the first is an array."""
    if isinstance(one, numpy.ndarray):
        return numpy.maximum(one, other)
    return one if one > other else other


@dataclass(frozen=True, slots=True)
class Costs:
    """Estimates, in seconds. Formulas are plain arithmetic, so that they take arrays too."""

    prefill: tuple[float, ...] = PREFILL_PRIOR
    # The same on a decode worker, between the steps of its other requests; the last is for a
    # token times a busy prefill worker.
    local: tuple[float, ...] = _as_local(PREFILL_PRIOR)
    transfer: tuple[float, ...] = TRANSFER_PRIOR
    exposed: tuple[float, ...] = EXPOSED_PRIOR
    # A fetch, a byte: as a push, after the holder's current step.
    fetch: tuple[float, ...] = (TRANSFER_PRIOR[0] + STEP_PRIOR[0], TRANSFER_PRIOR[1])
    step: tuple[float, ...] = STEP_PRIOR
    # What a second of a prefill worker's compute adds to the time of each decoding request.
    interfered: float = INTERFERENCE_PRIOR
    answer_tokens: float = ANSWER_PRIOR

    def prefill_seconds(
        self, tokens: int, prefix: int, pending: int = 0, restored: int = 0
    ) -> float:
        """A prefill worker computes `pending` tokens and then `tokens`, which follow `prefix`
        cached ones, of which it restores `restored`."""
        once, each, look, before, back = self.prefill
        own = tokens * (each + look * (prefix + tokens / 2))
        return once + own + before * pending + back * restored

    def wait_seconds(self, pending: int, restored: int = 0) -> float:
        """The part of this that is not the prompt's own compute."""
        return self.prefill[3] * pending + self.prefill[4] * restored

    def local_seconds(
        self,
        tokens: int,
        prefix: int,
        pending: int = 0,
        restored: int = 0,
        busy_prefill: int = 0,
    ) -> float:
        """The same for a decode worker, beside `busy_prefill` prefill workers."""
        once, each, look, before, back, busy = self.local
        own = tokens * (each + look * (prefix + tokens / 2) + busy * busy_prefill)
        return once + own + before * pending + back * restored

    def local_wait_seconds(self, pending: int) -> float:
        """A decode worker computes queued tokens."""
        return self.local[3] * pending

    def restore_seconds(self, tokens: int) -> float:
        """A decode worker restores tokens from its second tier."""
        return self.local[4] * tokens

    def transfer_seconds(self, size: int) -> float:
        """A push of `size` bytes, from its first write to its last."""
        once, each = self.transfer
        return (once + each * size) * (size > 0)

    def exposed_seconds(self, size: int, compute_seconds: float) -> float:
        """From the end of a prompt's compute to the arrival of its last page."""
        once, each = self.exposed
        return once + each * larger(self.transfer_seconds(size) - compute_seconds, 0.0)

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
        own = self.step_seconds(requests + 1, pages + own_pages)
        added = requests * (request + page * own_pages)
        return min(tokens, self.answer_tokens) * (own + added)

    def room_seconds(self, waiting: int, requests: int, pages: int) -> float:
        """Until `waiting` requests have room: one place for each answer that ends."""
        one_answer = self.answer_tokens * self.step_seconds(requests, pages)
        return waiting * one_answer / (requests + (requests == 0))

    def interference(self, decoding: int, prefilling: int = 0) -> float:
        """Seconds that a second of compute on a prefill worker adds to requests on decode workers:
        `decoding` on those that only decode, `prefilling` on those that prefill too. 0 where the
        pools share no hardware."""
        each, slower = self.local[1], self.local[5]
        return decoding * self.interfered + prefilling * slower / (each + slower)


class CostModel:
    def __init__(self) -> None:
        # None until measured; the first of the two also serves as the other's estimate.
        self._prefill: OnlineFit | None = None
        self._local: OnlineFit | None = None
        # Prompts that the other role has computed since each was measured last.
        self._prefill_age = 0
        self._local_age = 0
        self._transfer = OnlineFit(TRANSFER_PRIOR, REQUEST_MEMORY)
        # Two fits: how often a push is late says nothing about how late one is.
        self._hidden = OnlineFit(EXPOSED_PRIOR[:1], REQUEST_MEMORY)
        self._beyond = OnlineFit(EXPOSED_PRIOR[1:], REQUEST_MEMORY)
        self._fetch: OnlineFit | None = None
        self._step = OnlineFit(STEP_PRIOR, STEP_MEMORY)
        self._interference = InterferenceShare(INTERFERENCE_PRIOR)
        self._answers = 0
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
        return self._prefill is not None or self._local is not None

    def note_prefill(
        self, tokens: int, prefix: int, pending: int, seconds: float, restored: int = 0
    ) -> None:
        """A prompt's `seconds` on a prefill worker from its arrival: `tokens` behind `prefix`
        cached ones, of which `restored` were restored, with `pending` ones queued before it."""
        if self._prefill is None:
            self._prefill = OnlineFit(self.costs.prefill, REQUEST_MEMORY)
        self._prefill_age, self._local_age = 0, self._local_age + 1
        self._note(self._prefill, _prompt(tokens, prefix, pending, restored), seconds)

    def note_local(
        self,
        tokens: int,
        prefix: int,
        pending: int,
        seconds: float,
        restored: int = 0,
        busy_prefill: float = 0.0,
    ) -> None:
        """The same for a decode worker, with `busy_prefill` busy prefill workers on average."""
        if self._local is None:
            self._local = OnlineFit(self.costs.local, REQUEST_MEMORY)
        self._local_age, self._prefill_age = 0, self._prefill_age + 1
        features = (*_prompt(tokens, prefix, pending, restored), float(tokens * busy_prefill))
        self._note(self._local, features, seconds)

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
        """Pages of `size` bytes were fetched, or waited for in vain."""
        if self._fetch is None:
            self._fetch = OnlineFit(self.costs.fetch, REQUEST_MEMORY)
        self._note(self._fetch, (1.0, float(size)), seconds)

    def note_step(
        self, requests: int, pages: int, busy_prefill: float, seconds: float, steps: int = 1
    ) -> None:
        """`steps` steps of a decode worker of `seconds` each, with `busy_prefill` busy prefill
        workers on average."""
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

    def _note(self, fit: OnlineFit, features: tuple[float, ...], seconds: float) -> None:
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
        )

    def _estimate_prompts(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """A prompt's coefficients on prefill and on decode workers. Stale estimates decay toward
        the other role's, so that it is tried again."""
        if self._prefill is None or self._local is None:
            local = self._local.coefficients if self._local else ()
            prefill = self._prefill.coefficients if self._prefill else local[:5] or PREFILL_PRIOR
            return prefill, local or _as_local(prefill)
        prefill, local = self._prefill.coefficients, self._local.coefficients
        return (
            _decayed(prefill, local[:5], self._prefill_age),
            _decayed(local, (*prefill, *local[5:]), self._local_age),
        )


def _decayed(own: tuple[float, ...], other: tuple[float, ...], age: int) -> tuple[float, ...]:
    keep = math.exp(-age / FADING_MEMORY)
    return tuple(keep * a + (1.0 - keep) * b for a, b in zip(own, other, strict=True))


def _prompt(tokens: int, prefix: int, pending: int, restored: int) -> tuple[float, ...]:
    """A token attends to all before it: the prefix, and half of the others on average."""
    looks = tokens * (prefix + tokens / 2)
    return 1.0, float(tokens), looks, float(pending), float(restored)
