"""Chats of several turns: the gain of fetching pages from decode.

    python -m bench.turns [--model MODEL] [--chats N] [--turns N] [--prompt N] [--answer N]

One prefill worker computes every turn; one decode worker has generated the history. The same
chats run twice, on fresh workers each: with `router.fetch_pages` never and auto. Prints the time
to first token and the fetched tokens by turn, and whether the answers are the same.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from baton import Answer, Client
from bench.trace_cluster import Shape, router, workers
from bench.trace_workload import FreshPrompts

WORDS_PER_TURN = 24
WARM_UP = (200, 40, 120)  # lengths of prompts
SETTLE_SECONDS = 0.2
"""Time for the router to learn what is cached, as while a user types."""


@dataclass(frozen=True, slots=True)
class Turn:
    ttft: float
    answer: Answer


def main() -> None:
    arguments = _parse()
    chats = {mode: _measure(mode, arguments) for mode in ("never", "auto")}
    for mode, measured in chats.items():
        _report(mode, measured)
    answers = [
        [[turn.answer.token_ids for turn in chat] for chat in measured]
        for measured in chats.values()
    ]
    print("the answers are the same" if answers[0] == answers[1] else "THE ANSWERS DIFFER")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--chats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=160, help="tokens of the first turn")
    parser.add_argument("--answer", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--threads", type=int, default=1, help="threads of each worker")
    parser.add_argument("--kv-memory", default="256MiB")
    return parser.parse_args()


def _measure(mode: str, arguments: argparse.Namespace) -> list[list[Turn]]:
    """Runs the chats one after the other on a fresh cluster."""
    shape = Shape(arguments.model, 1, 1, arguments.threads, arguments.kv_memory, page_size=16)
    settings = {"local_prefill": "never", "fetch_pages": mode}
    prompts = FreshPrompts(seed=1)
    with (
        tempfile.TemporaryDirectory() as folder,
        workers(shape, Path(folder)) as members,
        router(shape, Path(folder), "router", members, settings) as door,
        Client(door.address) as client,
    ):
        for length in WARM_UP:
            _ask(client, prompts.draw(length), 8)
        return [_chat(client, prompts, arguments) for _ in range(arguments.chats)]


def _chat(client: Client, prompts: FreshPrompts, arguments: argparse.Namespace) -> list[Turn]:
    history = prompts.draw(arguments.prompt)
    turns = []
    for _ in range(arguments.turns):
        turns.append(_ask(client, history, arguments.answer))
        history += tuple(turns[-1].answer.token_ids) + prompts.draw(WORDS_PER_TURN)
        time.sleep(SETTLE_SECONDS)
    return turns


def _ask(client: Client, prompt: tuple[int, ...], answer_tokens: int) -> Turn:
    began = time.monotonic()
    with client.stream(prompt, max_tokens=answer_tokens, ignore_eos=True) as stream:
        next(iter(stream))
        ttft = time.monotonic() - began
        for _ in stream:
            pass
        return Turn(ttft, stream.answer)


def _report(mode: str, chats: list[list[Turn]]) -> None:
    print(f"fetch_pages: {mode}, medians of {len(chats)} chats")
    print(f"{'turn':>6}{'tokens':>9}{'cached':>9}{'fetched':>9}{'TTFT':>12}")
    for number, turns in enumerate(zip(*chats, strict=True), start=1):
        usages = [turn.answer.usage for turn in turns]
        counts = (
            statistics.median(getattr(usage, name) for usage in usages)
            for name in ("prompt_tokens", "cached_tokens", "fetched_tokens")
        )
        ttft = statistics.median(turn.ttft for turn in turns)
        print(f"{number:>6}{''.join(f'{count:>9,.0f}' for count in counts)}{ttft * 1e3:>9,.0f} ms")


if __name__ == "__main__":
    main()
