"""Workers that answer without computing, so that a benchmark measures the router.

They implement a worker's side of Attach. Every answer repeats one letter, at a given
pace or as fast as the router takes it. A request's first prompt token identifies its
stream. The time when each of its tokens was sent is kept, to be compared with its
arrival at a client. With `slots` a decode worker runs that many answers at once;
further requests wait for their reservation, as they do for pages.
"""

from __future__ import annotations

import asyncio
import math
import struct
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton.core.tls import Identity
from baton.core.types import PROTOCOL, AttemptKey, Role
from baton.core.wire import role_to
from baton.rpc import listen
from baton.v1 import inference_pb2, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout

Context = grpc.aio.ServicerContext[Any, Any]

LOAD_SECONDS = 0.2
CONTEXT_LENGTH = 8192
EMBEDDING = struct.pack("<2f", 3.0, 4.0)


@dataclass(slots=True)
class Pace:
    """Shared by all workers; changed between measurements."""

    token: int
    # Seconds between two steps of one worker; 0 is as fast as possible.
    step_seconds: float = 0.0
    # Seconds that a prompt takes.
    prefill_seconds: float = 0.0
    # The embedding of an input's tokens.
    embed: Callable[[Sequence[int]], bytes] = lambda tokens: EMBEDDING
    # No step runs before it is set.
    go: asyncio.Event = field(default_factory=asyncio.Event)
    # Send times of each stream's tokens, from the second on.
    sent: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))


@dataclass(slots=True)
class _Answer:
    stream: int
    left: int
    prompt: Sequence[pb.Logprobs]  # still to be sent


class InstantWorker(worker_pb2_grpc.WorkerServicer):
    def __init__(
        self,
        role: Role,
        name: str,
        model: str,
        pace: Pace,
        phase: float = 0.0,
        slots: float = math.inf,
    ) -> None:
        """`phase` is the share of a step by which this worker lags the first."""
        self._slots = slots
        self._waiting: dict[AttemptKey, pb.Work] = {}
        self._role = role
        self._name = name
        self._model = model
        self._pace = pace
        self._phase = phase
        self._answers: dict[AttemptKey, _Answer] = {}
        self._due = 0.0
        self._begun = asyncio.Event()
        self._writing = asyncio.Lock()

    async def start(self, identity: Identity | None = None) -> str:
        """Starts serving. Returns its address."""
        self._server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        port = listen(self._server, "127.0.0.1:0", identity)
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        await self._server.stop(None)

    async def Attach(  # type: ignore[override]
        self, requests: AsyncIterator[pb.RouterMessage], context: Context
    ) -> None:
        await anext(aiter(requests))
        await self._write(context, pb.WorkerMessage(welcome=self._welcome()))
        tasks = [
            asyncio.ensure_future(self._report(context)),
            asyncio.ensure_future(self._step_on(context)),
        ]
        try:
            async for message in requests:
                if self._pace.prefill_seconds and _is_prompt(message):
                    tasks.append(asyncio.ensure_future(self._reply_later(context, message)))
                    continue
                for answer in self._replies(message):
                    await self._write(context, answer)
        finally:
            for task in tasks:
                task.cancel()

    async def _reply_later(self, context: Context, message: pb.RouterMessage) -> None:
        await asyncio.sleep(self._pace.prefill_seconds)
        for answer in self._replies(message):
            await self._write(context, answer)

    def _replies(self, message: pb.RouterMessage) -> list[pb.WorkerMessage]:
        match message.WhichOneof("kind"):
            case "ping":
                return [pb.WorkerMessage(pong=pb.Pong())]
            case "connect":
                connect = message.connect
                connected = pb.Connected(worker_id=connect.worker_id, agent=connect.pool.agent)
                return [pb.WorkerMessage(connected=connected)]
            case "prefill":
                return [self._first_token(message.prefill.work)]
            case "deliver":
                pushed = pb.Pushed(
                    request_id=message.deliver.request_id, epoch=message.deliver.epoch
                )
                return [pb.WorkerMessage(pushed=pushed)]
            case "reserve":
                work = message.reserve.work
                self._waiting[AttemptKey(work.request_id, work.epoch)] = work
                return self._reservations()
            case "compute":
                work = message.compute.work
                self._begin(work, _wanted(work), _prompt_logprobs(work))
            case "release":
                key = AttemptKey(message.release.request_id, message.release.epoch)
                self._answers.pop(key, None)
                self._waiting.pop(key, None)
                return self._reservations()
        return []

    def _reservations(self) -> list[pb.WorkerMessage]:
        """Reserves for waiting requests while slots are free."""
        reserved = []
        while self._waiting and len(self._answers) < self._slots:
            work = self._waiting.pop(next(iter(self._waiting)))
            self._begin(work, _wanted(work) - 1)
            answer = pb.Reserved(request_id=work.request_id, epoch=work.epoch)
            reserved.append(pb.WorkerMessage(reserved=answer))
        return reserved

    def _first_token(self, work: pb.Work) -> pb.WorkerMessage:
        return pb.WorkerMessage(
            first_token=pb.FirstToken(
                request_id=work.request_id,
                epoch=work.epoch,
                token=self._pace.token,
                finish_reason=_finish(_wanted(work) - 1),
                embedding=self._pace.embed(work.prompt_tokens) if work.pooling else b"",
                prompt_logprobs=_prompt_logprobs(work),
            )
        )

    def _begin(self, work: pb.Work, tokens: int, prompt: Sequence[pb.Logprobs] = ()) -> None:
        key = AttemptKey(work.request_id, work.epoch)
        self._answers[key] = _Answer(work.prompt_tokens[0], tokens, prompt)
        self._begun.set()

    async def _step_on(self, context: Context) -> None:
        while True:
            if not self._answers:
                self._begun.clear()
                await self._begun.wait()
            await self._pace.go.wait()
            await self._await_step()
            await self._write(context, pb.WorkerMessage(step=self._step()))
            for reserved in self._reservations():
                await self._write(context, reserved)

    async def _await_step(self) -> None:
        """Waits until the next step is due. Missed steps are skipped."""
        if step := self._pace.step_seconds:
            now = time.monotonic()
            due = _next_due(now, step, self._phase)
            # A timer may fire slightly too early.
            self._due = due + step if due - self._due < step / 2 else due
            await asyncio.sleep(self._due - now)

    def _step(self) -> pb.Step:
        step = pb.Step()
        streams = []
        for key, answer in list(self._answers.items()):
            answer.left -= 1
            streams.append(answer.stream)
            step.tokens.add(
                request_id=key.request_id,
                epoch=key.epoch,
                token_ids=[self._pace.token],
                finish_reason=_finish(answer.left),
                prompt_logprobs=answer.prompt,
            )
            answer.prompt = ()
            if not answer.left:
                del self._answers[key]
        now = time.monotonic()
        for stream in streams:
            self._pace.sent[stream].append(now)
        return step

    async def _report(self, context: Context) -> None:
        while True:
            load = pb.Load(
                free_pages=1_000_000, running=len(self._answers), waiting=len(self._waiting)
            )
            await self._write(context, pb.WorkerMessage(load=load))
            # Workers do not all report at the same time.
            now = time.monotonic()
            await asyncio.sleep(_next_due(now, LOAD_SECONDS, self._phase) - now)

    async def _write(self, context: Context, message: pb.WorkerMessage) -> None:
        # A stream takes one message at a time.
        async with self._writing:
            await context.write(message)

    def _welcome(self) -> pb.Welcome:
        return pb.Welcome(
            worker_id=self._name,
            role=role_to(self._role),
            protocol=PROTOCOL,
            model=self._model,
            context_length=CONTEXT_LENGTH,
            pool=PoolAddress(agent=self._name, layout=PoolLayout(model="instant", page_size=16)),
            total_pages=1_000_000,
        )


def _is_prompt(message: pb.RouterMessage) -> bool:
    """True if the message is a prompt to compute. Embedding inputs are answered at once."""
    kind = message.WhichOneof("kind")
    return kind == "compute" or (kind == "prefill" and not message.prefill.work.pooling)


def _prompt_logprobs(work: pb.Work) -> list[pb.Logprobs]:
    """Log probabilities of all tokens but the first, if requested."""
    count = len(work.prompt_tokens) - 1 if work.HasField("prompt_logprobs") else 0
    return [pb.Logprobs()] * count


def _wanted(work: pb.Work) -> int:
    """How many tokens are still to be generated."""
    return work.max_tokens - work.answer_tokens


def _next_due(now: float, interval: float, phase: float) -> float:
    """The next due time of an event every `interval` seconds, shifted by `phase` of one."""
    return (math.ceil(now / interval - phase) + phase) * interval


def _finish(left: int) -> inference_pb2.FinishReason.ValueType:
    return inference_pb2.FINISH_REASON_UNSPECIFIED if left else inference_pb2.FINISH_REASON_LENGTH
