"""Decoding with and without guessed tokens: tokens a second, and whether answers are the same.

    python -m bench.speculation [--model MODEL] [--draft-model MODEL] [--quantization none]
                                [--rows rewrite code json free complete] [--streams 1 8]
                                [--tokens 160] [--repeats 3]

One engine under a decode worker's scheduler answers the same prompts in turn with speculation off
and on (ngram, and draft if there is one), greedily. Times are from the first tokens to the last
ones, and the best of all repeats, each of which has all ways. They have the draft's prompts in
them. Every answer must be the same in all ways, or the run fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

from baton.core import model_store
from baton.core.config import Config
from baton.core.types import AttemptKey, ChatPrompt, Message, Role, Sampling, Work
from baton.decode_worker.decode_scheduler import DecodeScheduler
from baton.decode_worker.drafts import Drafts
from baton.decode_worker.speculation import Speculation
from baton.engine.draft_model import find_draft, load_draft
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from baton.engine.step import token_and_logprobs
from baton.router.prompts.text import Text
from baton.worker.metrics import WorkerMetrics
from baton.worker.step_pipeline import StepPipeline
from baton.worker.step_record import StepRecord

CHUNK_TOKENS = 256

STORY = """The old lighthouse stood on the northern cliff, and every evening the keeper climbed its
narrow stairs with a lamp in his hand. He counted the steps aloud, because his father had counted
them before him, and because the sound kept him company. At the top he cleaned the great lens,
filled the tank with oil, and looked out over the grey water until the first ship passed. When fog
came in from the sea he rang the bell, once every minute, through the whole night if he had to."""

CODE = '''class Account:
    """A bank account with a balance and a history of changes."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("the balance is too low")
        self.balance -= amount
        self.history.append(("withdraw", amount))
'''

RECORDS = """{"id": 1, "name": "Anna Schmidt", "city": "Berlin", "email": "anna@example.com"}
{"id": 2, "name": "Bruno Costa", "city": "Lisbon", "email": "bruno@example.com"}
{"id": 3, "name": "Chen Wei", "city": "Beijing", "email": "chen@example.com"}
{"id": 4, "name": "Dana Levi", "city": "Haifa", "email": "dana@example.com"}
{"id": 5, "name": "Emil Novak", "city": "Prague", "email": "emil@example.com"}"""

HEAP = '''class MinHeap:
    """A binary heap in a list: the smallest item is first."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)
        self._sift_up(len(self.items) - 1)
'''

PROMPTS = {
    "rewrite": f"Repeat this text, but write 'captain' instead of 'keeper':\n\n{STORY}",
    "code": "Here is a Python class. Write it again with the class renamed to Wallet, and change"
    f" nothing else:\n\n```python\n{CODE}```",
    "json": f"Reformat these lines as one JSON array, with all fields:\n\n{RECORDS}",
    "complete": f"Complete this class with pop, _sift_up and _sift_down:\n\n```python\n{HEAP}```",
    "free": "Write a short story about a fox who learns to swim.",
}


@dataclass(slots=True)
class Run:
    """All answers to some prompts, and the time after their first tokens."""

    answers: list[list[int]]
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    guessed: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    prompts: list[list[int]]
    most_tokens: int
    stops: frozenset[int]


def guesser(way: str, engine: Engine) -> Speculation | None:
    if way == "off":
        return None
    if way == "ngram" or engine.draft is None:
        return Speculation()
    return Speculation(Drafts(engine.draft, engine.architecture.vocabulary_size, CHUNK_TOKENS))


def decode(engine: Engine, load: Workload, way: str) -> Run:
    speculation = guesser(way, engine)
    scheduler = DecodeScheduler(engine.pool, 64, CHUNK_TOKENS, speculation)
    pipeline = StepPipeline(engine, WorkerMetrics("bench", Role.DECODE), StepRecord())
    pipeline.on_step = speculation.note_step if speculation else None
    sequences = []
    for number, prompt in enumerate(load.prompts):
        key = AttemptKey(str(number), 1)
        work = Work(key, prompt, Sampling(), load.most_tokens, load.stops)
        sequences.append(Sequence.queued(work, engine.pool))
        scheduler.compute(sequences[-1])
    run = Run([])
    began = time.perf_counter()
    while plan := scheduler.next():
        for settled in pipeline.advance(plan):
            sequence, tokens = settled.sequence, [token_and_logprobs(d)[0] for d in settled.drawn]
            finish = sequence.append(*tokens) if tokens else None
            sequence.settle(settled.computed)
            run.guessed += settled.guesses
            run.accepted += len(tokens) - 1 if settled.guesses else 0
            run.tokens += len(tokens)
            if finish:
                scheduler.remove(sequence)
        run.steps += 1
        if any(not each.generated for each in sequences):
            began, run.tokens, run.steps = time.perf_counter(), 0, 0
    run.seconds = time.perf_counter() - began
    run.answers = [each.tokens[each.prompt_length :] for each in sequences]
    return run


def tokenized(text: Text, prompt: str, streams: int) -> list[list[int]]:
    """Different prompts of one kind."""
    greetings = [f"Request {number}. " if number else "" for number in range(streams)]
    chats = [ChatPrompt((Message("user", greeting + prompt),)) for greeting in greetings]
    return [text.encode(chat) for chat in chats]


def measure(engine: Engine, load: Workload, ways: list[str], repeats: int) -> dict[str, Run]:
    """The best run of each way."""
    runs = [{way: decode(engine, load, way) for way in ways} for _ in range(repeats)]
    if any(run.answers != runs[0]["off"].answers for each in runs for run in each.values()):
        sys.exit("an answer with guesses differs from the one without")
    return {way: min((each[way] for each in runs), key=lambda run: run.seconds) for way in ways}


def report(name: str, streams: int, runs: dict[str, Run]) -> None:
    plain = runs["off"]
    off = plain.tokens / plain.seconds
    for way, run in runs.items():
        if way == "off":
            continue
        on = run.tokens / run.seconds
        print(
            f"{name:<10}{way:<8}{streams:>8}{off:>10.1f}{on:>10.1f}{on / off:>8.2f}"
            f"{run.accepted / max(run.guessed, 1):>10.0%}{plain.steps / run.steps:>8.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default=model_store.EMBEDDED)
    parser.add_argument("--rows", nargs="+", choices=list(PROMPTS), default=list(PROMPTS))
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draft-model", default="")
    parser.add_argument("--quantization", default="none", choices=["none", "int8"])
    options = parser.parse_args()
    folder = model_store.locate(options.model)
    config = Config(
        speculation="draft" if options.draft_model else "ngram",
        draft_model=options.draft_model,
        quantization=options.quantization,
    )
    engine = Engine.load(
        folder,
        threads=options.threads,
        kv_memory=1 << 29,
        quantization=options.quantization,
        max_context=4096,
    )
    if draft := find_draft(config, folder, weights=True):
        engine.draft = load_draft(config, draft, engine)
    ways = ["off", "ngram", *(["draft"] if draft else [])]
    text = Text.load(folder)
    columns = f"{'streams':>8}{'off':>10}{'on':>10}{'ratio':>8}{'accepted':>10}{'a step':>8}"
    print(f"{'':<18}{columns}")
    for name in options.rows:
        for streams in options.streams:
            prompts = tokenized(text, PROMPTS[name], streams)
            load = Workload(prompts, options.tokens, text.eos_token_ids)
            report(name, streams, measure(engine, load, ways, options.repeats))


if __name__ == "__main__":
    main()
