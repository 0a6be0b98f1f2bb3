"""Decoding with and without guesses: tokens per second, and whether answers are the same.

    python -m bench.speculation [--model MODEL] [--draft-model MODEL] [--quantization none]
                                [--rows rewrite code json complete free noise] [--streams 1 8]
                                [--tokens 160] [--repeats 3]

One engine under a decode worker's scheduler answers the same prompts greedily with speculation off
and on (ngram, and draft if there is one); `noise` is sampled at a high temperature, so that nothing
can be guessed. The ways take turns step by step, so that other load on the machine affects all of
them. Times run from the first tokens to the last ones and include the draft's prompts; the repeat
with the median ratio is shown. Every answer must be the same in all ways, or the run fails.
"""

from __future__ import annotations

import argparse
import sys

from baton.core import model_store
from baton.core.config import Config
from baton.core.types import ChatPrompt, Message, Sampling
from baton.decode_worker.drafts import Drafts
from baton.decode_worker.speculation import Speculation
from baton.engine.draft_model import find_draft, load_draft
from baton.engine.engine import Engine
from baton.router.prompts.text import Text
from bench.decode_loop import GREEDY, DecodeLoop, Run, Workload

MAX_BATCH, CHUNK_TOKENS = 64, 256

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
    "noise": "Write a short story about a fox who learns to swim.",
}
NOISY = Sampling(temperature=2.0)


def guesser(way: str, engine: Engine) -> Speculation | None:
    if way == "off":
        return None
    if way == "ngram" or engine.draft is None:
        return Speculation()
    return Speculation(Drafts(engine.draft, engine.architecture.vocabulary_size, CHUNK_TOKENS))


def decode(engine: Engine, load: Workload, ways: list[str]) -> dict[str, Run]:
    decoding = {
        way: DecodeLoop(engine, load, guesser(way, engine), MAX_BATCH, CHUNK_TOKENS) for way in ways
    }
    going = list(decoding.values())
    while going:
        going = [each for each in going if each.step()]
    return {way: each.run for way, each in decoding.items()}


def tokenized(text: Text, prompt: str, streams: int) -> list[list[int]]:
    """Tokenizes different prompts of one kind."""
    greetings = [f"Request {number}. " if number else "" for number in range(streams)]
    chats = [ChatPrompt((Message("user", greeting + prompt),)) for greeting in greetings]
    return [text.encode(chat) for chat in chats]


def measure(engine: Engine, load: Workload, ways: list[str], repeats: int) -> list[dict[str, Run]]:
    """A run of each way, for each repeat."""
    runs = [decode(engine, load, ways) for _ in range(repeats)]
    if any(run.answers != runs[0]["off"].answers for each in runs for run in each.values()):
        sys.exit("an answer with guesses differs from the one without")
    return runs


def report(name: str, streams: int, way: str, runs: list[dict[str, Run]]) -> None:
    ordered = sorted(runs, key=lambda each: each[way].rate / each["off"].rate)
    plain, run = (ordered[len(ordered) // 2][each] for each in ("off", way))
    print(
        f"{name:<10}{way:<8}{streams:>8}{plain.rate:>10.1f}{run.rate:>10.1f}"
        f"{run.rate / plain.rate:>8.2f}{run.accepted / max(run.guessed, 1):>10.0%}"
        f"{plain.steps / run.steps:>8.2f}",
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
            sampling = NOISY if name == "noise" else GREEDY
            load = Workload(prompts, options.tokens, text.eos_token_ids, sampling)
            runs = measure(engine, load, ways, options.repeats)
            for way in ways[1:]:
                report(name, streams, way, runs)


if __name__ == "__main__":
    main()
