"""The gain and cost of the semantic cache: `python -m bench.semantic_responses --model FOLDER`.

Runs two routers in this process, between a client and workers that embed at once and take a given
time for a prompt: without a cache, and with a semantic cache in a real Redis. Its vector sets, one
or several, have many random questions of 384 dimensions: no two are similar, which is the worst
case of a search. Measures, in turn, the time from sending a question to its first token: for new
questions (misses, where computing wins), and for similar ones that must not be computed
(only-if-cached). The time to embed a question is not included: bench/embeddings.py measures it.
FOLDER is a sentence-transformers encoder, of which only the tokenizer is used.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import numpy
import uvloop

from baton.core.metrics import Spread
from baton.router.response_cache.redis_connection import RedisAddress, RedisConnection
from baton.router.response_cache.redis_store import semantic_name
from baton.router.response_cache.response_keys import Question
from baton.router.response_cache.semantic_cache import SemanticCache
from baton.router.response_cache.similar_questions import LINKED
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from bench.instant_worker import Pace
from bench.redis_server import RedisServer
from bench.responses import ANSWER_TOKENS, LETTER, router

DIMENSIONS = 384
CONNECTIONS = 4
"""Connections over which questions are added."""
ONLY = (("cache-control", "only-if-cached"),)


@functools.lru_cache(10_000)
def _direction(subject: tuple[int, ...]) -> bytes:
    draw = numpy.random.default_rng(subject)
    return draw.normal(size=DIMENSIONS).astype("<f4").tobytes()


def embed(tokens: Sequence[int]) -> bytes:
    """Gives questions with the same first two words the same vector."""
    return _direction(tuple(tokens[1:3]))


def question(number: int, rest: str) -> pb.GenerateRequest:
    text = f"{number // 100} {number % 100} {rest}"
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=text)])
    return pb.GenerateRequest(chat=chat, max_tokens=ANSWER_TOKENS, semantic_similarity=0.9)


async def first_token(
    stub: inference_pb2_grpc.InferenceAsyncStub,
    message: pb.GenerateRequest,
    metadata: tuple[tuple[str, str], ...] = (),
) -> tuple[float, str]:
    """Milliseconds to the first token, and the kind of cached answer: empty for none, or if Redis
    did not reply in time."""
    began, seconds, kind = time.perf_counter(), 0.0, ""
    try:
        async for event in stub.Generate(message, metadata=metadata):
            if not seconds and event.HasField("delta"):
                seconds = time.perf_counter() - began
            kind = event.finished.usage.response_cache.kind or kind
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise
    return seconds * 1000, kind


async def used_memory(connection: RedisConnection) -> int:
    reply = await connection.send("INFO", "memory")
    assert isinstance(reply, bytes)
    return int(reply.partition(b"used_memory:")[2].split()[0])


async def fill(url: str, asked: Question, entries: int, sets: int) -> None:
    """Adds random questions to the scope of one that was asked, and to others.

    Each connection adds one question at a time; Redis links several at once, in its threads.
    """
    connections = [await RedisConnection.open(RedisAddress.parse(url)) for _ in range(CONNECTIONS)]
    scopes = [asked.scope, *(os.urandom(32) for _ in range(sets - 1))]
    draw = numpy.random.default_rng(7)

    async def add(connection: RedisConnection, count: int) -> None:
        for number in range(count):
            scope = scopes[number % sets].hex().encode()
            vector = draw.normal(size=DIMENSIONS).astype("<f4").tobytes()
            name, member = semantic_name(asked.tenant, scope), os.urandom(32).hex()
            options = ("CAS", "Q8", "EF", str(LINKED), "SETATTR", vector)
            await connection.send("VADD", name, "FP32", vector, member, *options)

    before = await used_memory(connections[0])
    await asyncio.gather(*(add(each, entries // CONNECTIONS) for each in connections))
    grown = await used_memory(connections[0]) - before
    print(f"{entries} questions in {sets} vector sets, {grown / entries:,.0f} bytes each")
    for each in connections:
        each.close()


def show(name: str, taken: Sequence[float]) -> None:
    spread = Spread.of(taken)
    print(f"{name:<32}{spread.p50:8.2f} {spread.p90:8.2f} {spread.p99:8.2f}")


async def measure(arguments: argparse.Namespace, redis: RedisServer) -> None:
    entries, requests = arguments.entries, arguments.requests
    cache = {"responses": "semantic", "redis": redis.url, "semantic_questions": 2 * entries}
    asked: list[Question] = []
    inquiry = SemanticCache.inquiry

    def noted(*arguments: object) -> object:
        made = inquiry(*arguments)  # type: ignore[arg-type]
        if made:
            asked.append(made._question)
        return made

    SemanticCache.inquiry = noted  # type: ignore[assignment, method-assign]
    async with contextlib.AsyncExitStack() as stack:
        stubs = {}
        for name, section in (("no cache", {}), ("semantic", cache)):
            pace = Pace(LETTER, embed=embed, prefill_seconds=arguments.prefill_seconds)
            server = await stack.enter_async_context(router(section, pace, arguments.model))
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address))
            stubs[name] = inference_pb2_grpc.InferenceStub(channel)
        await first_token(stubs["semantic"], question(9_999, "to begin with"))
        await fill(redis.url, asked[0], entries, arguments.sets)
        misses: dict[str, list[float]] = {name: [] for name in stubs}
        for number in range(requests):
            for name, stub in stubs.items():
                misses[name].append((await first_token(stub, question(number, "is asked")))[0])
        assert server._responses
        await server._responses.settle()
        hits = [
            await first_token(stubs["semantic"], question(number, "is asked again"), ONLY)
            for number in range(requests)
        ]
    print(f"{'milliseconds to the first token':<32}     p50      p90      p99")
    for name, taken in misses.items():
        show(f"miss, {name}", taken)
    found = [milliseconds for milliseconds, kind in hits if kind == "semantic"]
    show(f"hit, semantic ({len(found)} of {requests})", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a sentence-transformers folder")
    parser.add_argument("--entries", type=int, default=100_000, help="questions")
    parser.add_argument("--sets", type=int, default=1, help="scopes that they are spread over")
    parser.add_argument(
        "--prefill-seconds", type=float, default=0.01, help="time of a prompt on a worker"
    )
    parser.add_argument("--requests", type=int, default=500, help="requests of each kind")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as redis:
        uvloop.run(measure(arguments, redis))


if __name__ == "__main__":
    main()
