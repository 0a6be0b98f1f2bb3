from __future__ import annotations

import asyncio

import pytest

from baton.core.errors import Internal, SlowReader
from baton.router.answers.answer_events import AnswerDelta, AnswerEvent
from baton.router.edges.client_buffer import ClientBuffer
from baton.v1 import inference_pb2 as pb

END = pb.Finished(finish_reason=pb.FINISH_REASON_STOP)


async def read(buffer: ClientBuffer) -> list[AnswerEvent]:
    return [event async for event in buffer]


async def test_buffered_deltas_are_merged() -> None:
    buffer = ClientBuffer(10)
    for text in ("a", "b", "c"):
        buffer.put(AnswerDelta(text, [ord(text)]))
    buffer.put(END)
    buffer.close()
    assert await read(buffer) == [AnswerDelta("abc", [97, 98, 99]), END]


async def test_buffered_deltas_are_merged_by_answer() -> None:
    buffer = ClientBuffer(10)
    for index, text in ((0, "a"), (1, "x"), (0, "b"), (1, "y")):
        buffer.put(AnswerDelta(text, [1], index))
    buffer.put(END)
    buffer.close()
    assert await read(buffer) == [AnswerDelta("ab", [1, 1]), AnswerDelta("xy", [1, 1], 1), END]


async def test_the_limit_counts_the_buffered_tokens_of_all_answers() -> None:
    buffer = ClientBuffer(3)
    for _ in range(3):  # each read at once
        buffer.put(AnswerDelta("xx", [1, 1]))
        assert await anext(buffer) == AnswerDelta("xx", [1, 1])
    buffer.put(AnswerDelta("xx", [1, 1]))
    with pytest.raises(SlowReader):
        buffer.put(AnswerDelta("yy", [1, 1], 1))


async def test_a_waiting_consumer_gets_each_delta() -> None:
    buffer = ClientBuffer(10)
    reading = asyncio.create_task(read(buffer))
    for text in ("a", "b"):
        await asyncio.sleep(0)
        buffer.put(AnswerDelta(text, [1]))
        await asyncio.sleep(0)
    buffer.close()
    assert await reading == [AnswerDelta("a", [1]), AnswerDelta("b", [1])]


async def test_more_than_the_limit_raises_slow_reader() -> None:
    buffer = ClientBuffer(3)
    for _ in range(3):
        buffer.put(AnswerDelta("x", [1]))
    with pytest.raises(SlowReader):
        buffer.put(AnswerDelta("x", [1]))


async def test_an_error_comes_after_buffered_deltas() -> None:
    buffer = ClientBuffer(3)
    buffer.put(AnswerDelta("x", [1]))
    buffer.close(Internal("broken"))
    assert await anext(buffer) == AnswerDelta("x", [1])
    with pytest.raises(Internal):
        await anext(buffer)


class Client:
    """Takes what it is given, while it keeps up."""

    def __init__(self) -> None:
        self.keeps_up = True
        self.taken: list[AnswerEvent] = []

    def write_now(self, event: AnswerEvent) -> bool:
        if self.keeps_up:
            self.taken.append(event)
        return self.keeps_up


async def test_a_client_that_keeps_up_is_written_to_at_once() -> None:
    buffer, client = ClientBuffer(3), Client()
    buffer.write_now = client.write_now
    reading = asyncio.create_task(read(buffer))
    await asyncio.sleep(0)
    for _ in range(5):
        buffer.put(AnswerDelta("xx", [1, 1]))
    assert client.taken == [AnswerDelta("xx", [1, 1])] * 5
    buffer.close()
    assert await reading == []


async def test_nothing_overtakes_buffered_deltas() -> None:
    buffer, client = ClientBuffer(9), Client()
    buffer.write_now = client.write_now
    taking = asyncio.create_task(anext(buffer))
    await asyncio.sleep(0)
    client.keeps_up = False
    buffer.put(AnswerDelta("a", [1]))
    client.keeps_up = True
    buffer.put(AnswerDelta("b", [2]))
    assert await taking == AnswerDelta("ab", [1, 2])
    # The reader has taken all there was, and may be writing it.
    buffer.put(AnswerDelta("c", [3]))
    assert not client.taken
    assert await anext(buffer) == AnswerDelta("c", [3])
