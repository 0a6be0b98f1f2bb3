"""Clients of every kind, drawn by a seed; each answer must be the undisturbed one.

A client whose router dies goes to the other one: a gRPC stream is resumed at the token after the
last that arrived, a call over HTTP is sent again.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import openai

import baton
from baton import AsyncClient

Call = Callable[[openai.AsyncOpenAI], Awaitable["Said"]]
Said = list[tuple[int, ...]] | list[str]
WORDS = ["river", "stone", "lamp", "winter", "garden", "engine", "paper", "cloud", "silver"]
PATIENCE_SECONDS = 300.0
AGAIN_SECONDS = 0.5
# Of the requests: the others may be found in caches of pages and responses.
FRESH = 0.6
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Question:
    kind: str
    prompt: str
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def draw(cls, kind: str, draw: random.Random, adapter: str) -> Question:
        prompt = " ".join(draw.choices(WORDS, k=draw.choice([4, 30, 120])))
        options: dict[str, Any] = {"max_tokens": draw.choice([8, 24, 60])}
        if draw.random() < 0.5:
            options |= {"temperature": 0.8, "seed": draw.randrange(1000)}
        elif kind in ("chat", "batch"):
            options |= {"temperature": 0.0}  # left out, it would be the API's 1
        if kind == "answers":
            options |= {"n": 2, "temperature": 0.9, "seed": draw.randrange(1000)}
        elif kind == "adapter":
            options |= {"model": adapter}
        elif kind == "grammar":
            options |= {"json_schema": SCHEMA, "max_tokens": 48}
        return cls(kind, prompt, options)

    def salted(self, salt: str) -> Question:
        """The same question, which no cache knows."""
        given: dict[str, object] = {"cache_salt": salt}
        if self.kind == "chat":  # a field that OpenAI's SDK does not know
            given = {"extra_body": given}
        return replace(self, options={**self.options, **given})


class Routers:
    """Clients of all routers, used in turn."""

    def __init__(self, grpc: list[str], http: list[str]) -> None:
        self.grpc = [AsyncClient(address) for address in grpc]
        self.http = [
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2) for url in http
        ]
        self._turn = 0

    def next(self) -> int:
        self._turn = (self._turn + 1) % len(self.grpc)
        return self._turn

    async def close(self) -> None:
        await asyncio.gather(*(each.close() for each in (*self.grpc, *self.http)))


async def ask_stream(routers: Routers, asked: Question, pause: float = 0.0) -> Said:
    """A stream that is resumed on the next router when its own is lost."""
    client = routers.grpc[routers.next()]
    stream = client.stream(asked.prompt, timeout=PATIENCE_SECONDS, **asked.options)
    tokens: list[int] = []

    async def receive() -> Said:
        async for delta in stream:
            tokens.extend(delta.token_ids)
            await asyncio.sleep(pause)
        return [tuple(tokens)]

    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return await receive()
        except baton.Unavailable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(AGAIN_SECONDS)
            stream = routers.grpc[routers.next()].resume(stream, timeout=PATIENCE_SECONDS)


async def ask_answers(routers: Routers, asked: Question) -> Said:
    """Several answers, which cannot be resumed: they are asked for again."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        client = routers.grpc[routers.next()]
        try:
            answer = await client.generate(asked.prompt, timeout=PATIENCE_SECONDS, **asked.options)
            return [choice.token_ids for choice in answer.choices]
        except baton.Unavailable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(AGAIN_SECONDS)


async def ask_slowly(routers: Routers, asked: Question) -> Said:
    return await ask_stream(routers, asked, pause=0.2)


async def ask_and_leave(routers: Routers, asked: Question) -> Said:
    """Nothing is compared of a stream that its client leaves."""
    client = routers.grpc[routers.next()]
    try:
        async with client.stream(asked.prompt, timeout=60, **asked.options) as stream:
            async for _ in stream:
                break
    except baton.BatonError:
        pass
    return []


async def over_http(routers: Routers, call: Call) -> Said:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return await call(routers.http[routers.next()])
        except (openai.APIConnectionError, openai.InternalServerError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(AGAIN_SECONDS)


async def ask_chat(routers: Routers, asked: Question) -> Said:
    async def chat(client: openai.AsyncOpenAI) -> Said:
        messages: Any = [{"role": "user", "content": asked.prompt}]
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, **asked.options
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        return ["".join(parts)]

    return await over_http(routers, chat)


async def ask_batch(routers: Routers, asked: Question) -> Said:
    """Three lines of one file. Routers share the folder, so any of them knows the batch."""
    body = {"model": MODEL, "prompt": asked.prompt, **asked.options}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    text = "\n".join(json.dumps({"custom_id": str(number), **line}) for number in range(3))

    async def start(client: openai.AsyncOpenAI) -> Said:
        file = await client.files.create(
            file=("in.jsonl", io.BytesIO(text.encode())), purpose="batch"
        )
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        return [batch.id]

    (name,) = await over_http(routers, start)

    async def result(client: openai.AsyncOpenAI) -> Said:
        batch = await client.batches.retrieve(str(name))
        if batch.status != "completed" or not batch.output_file_id:
            return [batch.status]
        answers = (await client.files.content(batch.output_file_id)).text.splitlines()
        bodies = [json.loads(each)["response"]["body"] for each in answers]
        return ["completed", *(str(each["choices"][0]["text"]) for each in bodies)]

    while True:
        found = await over_http(routers, result)
        if found[0] not in ("validating", "in_progress", "finalizing"):
            return found
        await asyncio.sleep(1.0)


MODEL = "SmolLM2-135M-Instruct"
KINDS: dict[str, Callable[[Routers, Question], Awaitable[Said]]] = {
    "stream": ask_stream,
    "answers": ask_answers,
    "adapter": ask_stream,
    "grammar": ask_stream,
    "slow": ask_slowly,
    "left": ask_and_leave,
    "chat": ask_chat,
    "batch": ask_batch,
}


class Mix:
    """Questions of a seed, asked again and again by several clients at once."""

    def __init__(self, routers: Routers, seed: int, count: int, adapter: str) -> None:
        draw = random.Random(seed)
        self._routers, self._draw = routers, draw
        kinds = itertools.islice(itertools.cycle(KINDS), count)
        self.questions = [Question.draw(kind, draw, adapter) for kind in kinds]
        self._expected: dict[int, Said] = {}
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def prepare(self) -> None:
        for number, asked in enumerate(self.questions):
            self._expected[number] = await KINDS[asked.kind](self._routers, asked)

    async def run(self, clients: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._keep_asking(end) for _ in range(clients)))

    async def _keep_asking(self, end: float) -> None:
        while time.monotonic() < end:
            number = self._draw.randrange(len(self.questions))
            self.outcomes[await self._outcome(number)] += 1

    async def _outcome(self, number: int) -> str:
        asked = self.questions[number]
        if self._draw.random() < FRESH:
            asked = asked.salted(str(self._draw.random()))
        try:
            found = await KINDS[asked.kind](self._routers, asked)
        except (baton.BatonError, openai.OpenAIError) as error:
            self.wrong.append(f"{asked}: {type(error).__name__}: {error}")
            return f"{asked.kind}: {type(error).__name__}"
        if found != self._expected[number]:
            self.wrong.append(f"{asked}: {found}, undisturbed {self._expected[number]}")
            return f"{asked.kind}: different"
        return f"{asked.kind}: same"
