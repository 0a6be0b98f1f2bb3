"""How much a batch slows other requests down.

    python -m bench.batches [--model MODEL] [--lines N] [--tokens N] [--requests N] [--follow-ups N]

Router, prefill and decode worker share the machine's cores. Short chats are streamed one by one:
while nothing else runs, while a batch runs, and, beside the batch, right after the answer to
another chat, as a program with several turns sends them. Prints the time to first token and of the
whole answer, and the batch's tokens per second alone and beside the chats.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import openai
from openai.types import Batch

from baton.core import metrics
from bench.counters import total
from bench.processes import FREE_ROUTER, Process, router, workers

ANSWER_TOKENS = 8
WARM_UP = 3
UNDER_WAY = 500
"""Tokens of a batch after which its requests no longer start all at once."""
ALONE_SECONDS = 20.0
MAX_SECONDS = 600.0


class Times(NamedTuple):
    first: float
    whole: float


class Bench:
    def __init__(self, door: Process, arguments: argparse.Namespace) -> None:
        self._door = door
        self._arguments = arguments
        self._draw = random.Random(1)
        self._asked = 0
        self._client = openai.OpenAI(base_url=f"http://{door.http}/v1", api_key="none")
        self._model = self._client.models.list().data[0].id

    def run(self) -> None:
        for _ in range(WARM_UP):
            self._chat()
        requests = self._arguments.requests
        report("idle", [self._chat() for _ in range(requests)])
        before, batch = self._generated(), self._start_batch()
        _wait(lambda: self._generated() - before >= UNDER_WAY)
        print(f"batch alone: {self._rate(lambda: time.sleep(ALONE_SECONDS)):.0f} tokens/s")
        beside: list[Times] = []
        rate = self._rate(lambda: beside.extend(self._visit() for _ in range(requests)))
        report("beside the batch", beside)
        print(f"batch beside a chat every second or two: {rate:.0f} tokens/s")
        report("right after another answer", self._follow_ups())
        counts = self._client.batches.retrieve(batch.id).request_counts
        print(f"lines completed by then: {counts.completed if counts else 0}")
        self._client.batches.cancel(batch.id)

    def _visit(self) -> Times:
        """Sends a chat after the batch has run alone for a while."""
        time.sleep(self._draw.uniform(1.0, 2.0))
        return self._chat()

    def _follow_ups(self) -> list[Times]:
        self._chat()
        return [self._chat() for _ in range(self._arguments.follow_ups)]

    def _chat(self) -> Times:
        self._asked += 1
        question = f"Question {self._asked}: what is {self._asked} plus {self._asked}?"
        began, first = time.perf_counter(), 0.0
        for chunk in self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": question}],
            stream=True,
            max_tokens=ANSWER_TOKENS,
            temperature=0,
        ):
            if not first and chunk.choices and chunk.choices[0].delta.content:
                first = time.perf_counter() - began
        return Times(first, time.perf_counter() - began)

    def _start_batch(self) -> Batch:
        lines = (self._line(index) for index in range(self._arguments.lines))
        content = "\n".join(map(json.dumps, lines)).encode()
        file = self._client.files.create(file=("in.jsonl", content), purpose="batch")
        return self._client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )

    def _line(self, index: int) -> dict[str, object]:
        content = f"Write a long story about number {index}. " * 12
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self._arguments.tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        url = "/v1/chat/completions"
        return {"custom_id": f"line-{index}", "method": "POST", "url": url, "body": body}

    def _rate(self, work: Callable[[], object]) -> float:
        """Generated tokens per second while `work` runs, those of chats included."""
        began, before = time.perf_counter(), self._generated()
        work()
        return (self._generated() - before) / (time.perf_counter() - began)

    def _generated(self) -> float:
        return total(self._door.metrics, metrics.GENERATION_TOKENS)


def main() -> None:
    arguments = _parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tree = {"model": arguments.model, "log_level": "warning"}
        sized = {"kv_memory": arguments.kv_memory}
        pools = {"prefill": sized, "decode": sized}
        settings = {"router": FREE_ROUTER, "batches": {"folder": str(folder / "kept")}}
        with (
            workers(folder, tree | pools, ("prefill-0", "decode-0")) as members,
            router(folder, tree | settings, members.values()) as door,
        ):
            Bench(door, arguments).run()


def report(name: str, times: list[Times]) -> None:
    columns = ([1e3 * each[part] for each in times] for part in range(2))
    shown = (f"median {statistics.median(each):.0f}, most {max(each):.0f}" for each in columns)
    first, whole = shown
    print(f"{name}: first token {first} ms; whole answer {whole} ms", flush=True)


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MAX_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the batch did not get under way")
        time.sleep(0.2)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200, help="tokens of a line's answer")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--follow-ups", type=int, default=20)
    parser.add_argument("--kv-memory", default="1GiB")
    return parser.parse_args()


if __name__ == "__main__":
    main()
