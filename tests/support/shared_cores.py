"""Two pools of workers in virtual time, on separate devices or on shared cores.

Every engine runs one step after the other: prefill the prompts that wait, decode a row for each
answer and, where it is sent prompts itself, chunks of these in the same steps. A step costs
seconds of a core. Where there are fewer cores than engines at work, prefill goes first and
decode shares what is left, as processes with a lower priority do.

The policy, the cost model and the queues are the router's own; it knows of the workers what a
router does: reports now and then, and how long things took.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.core.types import Role
from baton.router.placement.cost_model import CostModel
from baton.router.placement.placement import LocalPrefill, Placement, Snapshot
from baton.router.placement.policy import choose
from baton.router.placement.worker_state import PromptQueue, QueuedPrompt
from baton.router.workers.link_state import StepPace
from baton.v1 import worker_pb2 as pb

from .snapshots import DecodeView, PrefillView, cluster

REPORT_SECONDS = 0.1
PAGE_SIZE = 16
SLACK = 4.0
"""How many times as long as when it is alone a good request may take."""
BURST = 6
LEAST_SHARE = 0.015
"""Of a core, what who stands aside gets all the same."""
EARLIER, REQUESTS = 60, 40
"""That a router learns from, and that are counted."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Costs in seconds."""

    # A forward pass however few rows it has, and each of its rows.
    forward: float
    row: float
    # A message between router and worker; the last pages' way, when they have been computed.
    message: float
    push: float
    # That all engines share; without end where each has a device of its own.
    cores: float = math.inf
    prefill_chunk: int = 512
    decode_chunk: int = 256
    page_bytes: int = 0


# A small model on two cores that four workers share, and a large one on GPUs.
SHARED_CORES = Hardware(forward=0.045, row=0.0065, message=0.003, push=0.01, cores=2.0)
GPUS = Hardware(
    forward=4e-3,
    row=2e-5,
    message=5e-4,
    push=3e-3,
    prefill_chunk=8192,
    decode_chunk=2048,
    page_bytes=2 * 2**20,
)


@dataclass(eq=False, slots=True)
class Request:
    arrived: float
    tokens: int
    answer_tokens: int
    placement: Placement | None = None
    placed: float = 0.0
    prompt: QueuedPrompt | None = None
    prefill_busy: float = 0.0  # seconds until then, summed over prefill workers
    # On the worker that reads it.
    came: float = 0.0
    began: float = -1.0
    read: int = 0
    written: int = 0
    times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.arrived

    @property
    def itl(self) -> float:
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)


class Worker:
    """An engine, and the router's view of it."""

    def __init__(self, name: str, chunk: int, clock: Callable[[], float], *, decodes: bool) -> None:
        self.name = name
        self.chunk = chunk
        self.decodes = decodes
        self.reading: list[Request] = []
        self.writing: list[Request] = []
        self.step: list[tuple[Request, int]] = []
        self.left = 0.0  # of the step, seconds of a core
        self.reported = -math.inf
        self.load = pb.Load()
        self.prompts = PromptQueue(clock)
        self.pace = StepPace()
        self.active = 0

    def plan(self) -> list[tuple[Request, int]]:
        plan = [(request, 0) for request in self.writing]
        budget = self.chunk
        for request in self.reading:
            if budget:
                count = min(request.tokens - request.read, budget)
                plan.append((request, count))
                budget -= count
        return plan


@dataclass(frozen=True, slots=True)
class Objective:
    ttft: float
    itl: float

    def is_met(self, request: Request) -> bool:
        return request.ttft <= self.ttft and request.itl <= self.itl


class Cluster:
    def __init__(
        self,
        hardware: Hardware,
        mode: LocalPrefill,
        *,
        prefill: int = 2,
        decode: int = 2,
        model: CostModel | None = None,
    ) -> None:
        self.hardware = hardware
        self.model = model or CostModel()
        self._mode = mode
        self._now = 0.0
        self._prefill = [
            Worker(f"p{i}", hardware.prefill_chunk, self._clock, decodes=False)
            for i in range(prefill)
        ]
        self._decode = [
            Worker(f"d{i}", hardware.decode_chunk, self._clock, decodes=True) for i in range(decode)
        ]
        self._workers = {worker.name: worker for worker in (*self._prefill, *self._decode)}
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._placed = 0

    def run(self, arrivals: Sequence[float], tokens: int, answer_tokens: int) -> list[Request]:
        """Runs requests that arrive at these times, until all are answered."""
        began = self._now
        requests = [Request(began + at, tokens, answer_tokens) for at in arrivals]
        for request in requests:
            self._at(request.arrived, self._arriving(request))
        left = requests[:]
        while left:
            if len(left[-1].times) < answer_tokens:
                self._advance()
            else:
                left.pop()
        return requests

    def _arriving(self, request: Request) -> Callable[[], None]:
        return lambda: self._place(request)

    # Time

    def _clock(self) -> float:
        return self._now

    def _at(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._numbers), action))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._at(self._now + seconds, action)

    def _advance(self) -> None:
        """Advances to the next event or the end of the first step."""
        working = [worker for worker in self._workers.values() if worker.step]
        rates = dict(self._rates(working))
        ends = min(
            (self._now + worker.left / rates[worker.name] for worker in working), default=math.inf
        )
        event = self._events[0][0] if self._events else math.inf
        until = min(ends, event)
        for worker in working:
            worker.left -= (until - self._now) * rates[worker.name]
        self._now = until
        if event <= ends:
            heapq.heappop(self._events)[2]()
            return
        worker = min(working, key=lambda each: each.left)
        self._end_step(worker)

    def _rates(self, working: Sequence[Worker]) -> Iterator[tuple[str, float]]:
        """The share of a core that each engine gets."""
        first = [worker for worker in working if not worker.decodes]
        rest = [worker for worker in working if worker.decodes]
        cores = self.hardware.cores
        share = min(1.0, cores / max(1, len(first)))
        left = min(1.0, (cores - share * len(first)) / max(1, len(rest))) if rest else 0.0
        yield from ((worker.name, share) for worker in first)
        yield from ((worker.name, max(left, LEAST_SHARE)) for worker in rest)

    # The router

    def _place(self, request: Request) -> None:
        placement = choose(self._snapshot(request))
        assert isinstance(placement, Placement), placement
        self._placed += 1
        request.placement, request.placed = placement, self._now
        request.prefill_busy = self._prefill_busy_seconds
        reader = self._workers[placement.prefill or placement.decode]
        request.prompt = reader.prompts.add(request.tokens, 0)
        self._workers[placement.decode].active += 1
        self._after(self.hardware.message, lambda: self._come(reader, request))

    def _snapshot(self, request: Request) -> Snapshot:
        names = frozenset(worker.name for worker in self._decode)
        return cluster(
            prefill=[
                PrefillView(worker.name, worker.prompts.queued_tokens, names)
                for worker in self._prefill
            ],
            decode=[self._view(worker) for worker in self._decode],
            local=self._mode,
            costs=self.model.costs,
            turn=self._placed,
            prompt_tokens=request.tokens,
            tokens_wanted=request.answer_tokens,
            page_size=PAGE_SIZE,
            page_bytes=self.hardware.page_bytes,
        )

    def _view(self, worker: Worker) -> DecodeView:
        load = worker.load
        return DecodeView(
            worker_id=worker.name,
            requests=max(worker.active, load.running + load.waiting),
            free_pages=100_000,
            running=load.running - load.prefilling,
            waiting=load.waiting,
            leased_pages=load.leased_pages,
            pending_tokens=worker.prompts.queued_tokens,
            prefilling=load.prefilling,
        )

    def _hear_first(self, request: Request, reader: Worker, queue: float, compute: float) -> None:
        assert request.placement is not None
        forecast = request.placement.forecast
        assert request.prompt is not None
        assert forecast is not None
        reader.prompts.remove(request.prompt)
        request.times.append(self._now)
        if request.placement.prefill:
            self.model.note_prompt(
                Role.PREFILL, request.tokens, 0, forecast.pending_tokens, queue + compute
            )
        else:
            self.model.note_prompt(
                Role.DECODE,
                request.tokens,
                0,
                forecast.pending_tokens,
                queue + compute,
                0,
                self._busy_prefill(request),
            )

    def _busy_prefill(self, request: Request) -> float:
        """Average number of busy prefill workers since a request was placed."""
        busy = self._prefill_busy_seconds - request.prefill_busy
        return busy / (self._now - request.placed)

    @property
    def _prefill_busy_seconds(self) -> float:
        return sum(worker.prompts.busy_seconds for worker in self._prefill)

    def _hear_token(self, request: Request) -> None:
        request.times.append(self._now)
        if len(request.times) == request.answer_tokens:
            assert request.placement is not None
            self._workers[request.placement.decode].active -= 1
            self.model.note_answer(request.answer_tokens)

    def _hear_load(self, worker: Worker, load: pb.Load) -> None:
        worker.load = load
        worker.prompts.report(load.queued_tokens)
        if not worker.decodes:
            return
        stretch = worker.pace.drain(self._prefill_busy_seconds, self._now)
        if stretch is not None and worker.prompts.was_empty:
            busy, seconds = stretch.busy_prefill, stretch.seconds
            self.model.note_step(load.running, load.leased_pages, busy, seconds, stretch.steps)

    # Workers

    def _come(self, worker: Worker, request: Request) -> None:
        request.came = self._now
        worker.reading.append(request)
        self._start_step(worker)

    def _land(self, worker: Worker, request: Request) -> None:
        worker.writing.append(request)
        self._start_step(worker)

    def _start_step(self, worker: Worker) -> None:
        if worker.step:
            return
        worker.step = worker.plan()
        if not worker.step:
            return
        rows = sum(max(1, count) for _, count in worker.step)
        worker.left = self.hardware.forward + self.hardware.row * rows
        for request, count in worker.step:
            if count and request.began < 0:
                request.began = self._now

    def _end_step(self, worker: Worker) -> None:
        step, worker.step, worker.left = worker.step, [], 0.0
        tokens = []
        for request, count in step:
            request.read += count
            if request.read < request.tokens:
                continue
            request.written += 1
            if count:
                worker.reading.remove(request)
                self._first(worker, request)
            else:
                self._after(self.hardware.message, self._telling(request))
            if request in worker.writing and request.written == request.answer_tokens:
                worker.writing.remove(request)
            if worker.decodes:
                tokens.append(pb.StepTokens(request_id=str(id(request))))
        if tokens:
            sent = pb.Step(tokens=tokens)
            self._after(self.hardware.message, lambda: worker.pace.step(sent, self._now))
        self._start_step(worker)
        self._report(worker)

    def _telling(self, request: Request) -> Callable[[], None]:
        return lambda: self._hear_token(request)

    def _first(self, worker: Worker, request: Request) -> None:
        queue, compute = request.began - request.came, self._now - request.began
        self._after(
            self.hardware.message, lambda: self._hear_first(request, worker, queue, compute)
        )
        assert request.placement is not None
        if worker.decodes:
            worker.writing.append(request)
            return
        decode = self._workers[request.placement.decode]
        push = self.hardware.push
        self._after(push, lambda: self._land(decode, request))
        size = -(-request.tokens // PAGE_SIZE) * self.hardware.page_bytes
        self._after(
            push + self.hardware.message, lambda: self.model.note_push(size, push, push, compute)
        )

    def _report(self, worker: Worker) -> None:
        if worker.step and self._now - worker.reported < REPORT_SECONDS:
            return
        worker.reported = self._now
        pages = sum(-(-request.tokens // PAGE_SIZE) for request in worker.writing)
        load = pb.Load(
            running=len(worker.writing) + len(worker.reading),
            prefilling=len(worker.reading) if worker.decodes else 0,
            queued_tokens=sum(request.tokens - request.read for request in worker.reading),
            leased_pages=pages,
        )
        self._after(self.hardware.message, lambda: self._hear_load(worker, load))


@dataclass(frozen=True, slots=True)
class Calibration:
    requests_per_second: float
    objective: Objective


def calibrate(hardware: Hardware, tokens: int, answer_tokens: int) -> Calibration:
    """The capacity of the split cluster for prompts of one length."""
    cluster = Cluster(hardware, LocalPrefill.NEVER)
    alone = cluster.run([0.0], tokens, answer_tokens)[0]
    burst = cluster.run([0.0] * BURST, tokens, answer_tokens)
    taken = max(request.times[-1] for request in burst) - burst[0].arrived
    return Calibration(BURST / taken, Objective(SLACK * alone.ttft, SLACK * alone.itl))


class Outcome(NamedTuple):
    good: float  # of all requests
    seconds: float  # from arrival to the last token, on average
    local: float  # of all prompts


def outcome(
    cluster: Callable[[], Cluster],
    found: Calibration,
    load: float,
    shape: tuple[int, int],
    seeds: int,
) -> Outcome:
    """Of requests at `load`, on clusters that have learned from some at 60% of it.

    `shape` is the tokens of a prompt and of its answer."""
    rate = load * found.requests_per_second
    requests = []
    for seed in range(seeds):
        fresh, draw = cluster(), random.Random(seed)
        fresh.run(_poisson(draw, 0.6 * rate, EARLIER), *shape)
        requests += fresh.run(_poisson(draw, rate, REQUESTS), *shape)
    return Outcome(
        statistics.mean(map(found.objective.is_met, requests)),
        statistics.mean(request.times[-1] - request.arrived for request in requests),
        statistics.mean(not request.placement.prefill for request in requests if request.placement),
    )


def _poisson(draw: random.Random, rate: float, count: int) -> list[float]:
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + draw.expovariate(rate))
    return times
