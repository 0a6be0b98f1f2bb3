"""Speculation on one GPU: the cost of a step with guesses, and the gain.

    python -m bench.guesses [--config CONFIG_JSON] [--draft CONFIG_JSON]
                            [--rows steps right nothing draft]

Needs a GPU, torch and triton; no weights. The model has the shape of the config (Llama 3.1 8B's by
default) and random bfloat16 weights; prompts are random tokens.

- steps: the device time of a step that checks guesses, against one without; then the time from one
  step to the next when each waits for the previous one;
- right: tokens per second with a guesser that is right 80% of the time, against none. Depths are
  chosen, and steps wait or run ahead, as in a decode worker;
- nothing: the same with n-gram guesses in text without repetition: tokens are drawn from nearly
  uniform logits;
- draft: with a draft model of another shape (Llama 3.2 1B's by default), whose guesses are replaced
  so that 80% are right; then with its own guesses, which are wrong.

Answers with and without guesses must be equal, or the run fails.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from baton.core.config import Config, with_device_defaults
from baton.core.config_values import Size
from baton.core.types import AttemptKey, Sampling, Work
from baton.decode_worker.draft_pricing import Follower
from baton.decode_worker.drafts import Drafts
from baton.decode_worker.speculation import Speculation, most_guesses
from baton.decode_worker.step_cost import StepCost
from baton.engine.acceptance import Offer
from baton.engine.draft_model import load_draft
from baton.engine.engine import Engine
from baton.engine.gpu.batch import step_arrays, upload
from baton.engine.gpu.device import GpuSettings
from baton.engine.gpu.runner import GpuRunner
from baton.engine.page_pool import PagePool
from baton.engine.sequence import Sequence
from baton.engine.step import Drawn, Plan, token_and_logprobs
from bench.decode_loop import DecodeLoop, Run, Workload
from bench.gpu import CONFIGS
from bench.gpu_floors import event_ms

CONTEXT, MAX_BATCH, CHUNK_TOKENS = 512, 256, 8192
STEPS = ((1, 4), (1, 8), (2, 4), (4, 4), (8, 4), (32, 3))
"""Sequences of a step, and the guesses of each."""

RIGHT = 0.8
ANSWER = 160
MANY = 30


class Known(Speculation):
    """Guesses the right token with probability RIGHT."""

    def __init__(self, answers: list[list[int]]) -> None:
        super().__init__(runs_ahead=True)
        self._answers = answers
        self._draw = random.Random(0)

    def _found(self, sequence: Sequence) -> Offer:
        answer = self._answers[int(sequence.work.key.request_id)]
        start = sequence.generated
        right = answer[start : start + most_guesses(sequence)]
        guesses = [token if self._draw.random() < RIGHT else token ^ 1 for token in right]
        return Offer(guesses, [RIGHT ** (place + 1) for place in range(len(guesses))])


class KnownDrafts(Drafts):
    """A draft that computes its guesses, then replaces them: right with probability RIGHT."""

    def __init__(self, draft: Engine, answers: list[list[int]]) -> None:
        super().__init__(draft, draft.architecture.vocabulary_size, CHUNK_TOKENS)
        self._answers = answers
        self._draw = random.Random(0)

    def _add(self, follower: Follower, drawn: Drawn) -> bool:
        sequence, (_, logprobs) = follower.sequence, token_and_logprobs(drawn)
        if not logprobs or not sequence.work.key.request_id:
            return super()._add(follower, drawn)  # a rehearsal's
        token = self._answers[int(sequence.work.key.request_id)][sequence.generated]
        right = self._draw.random() < RIGHT
        follower.add(token if right else token ^ 1, logprobs.logprob)
        return True


class Always(Speculation):
    """Makes `depth` right guesses in every step."""

    def __init__(self, answers: list[list[int]], depth: int) -> None:
        super().__init__(runs_ahead=True)
        self._answers = answers
        self._depth = depth

    def waits(self, plan: Plan, most_rows: int) -> bool:
        return any(each.expected for each in plan)

    def guess(self, plan: Plan, most_rows: int, pool: PagePool, pages: int) -> None:
        for each in plan:
            if each.uncomputed == 1:
                answer = self._answers[int(each.work.key.request_id)]
                depth = min(self._depth, most_guesses(each))
                each.lease.cover(pool.pages_for(each.computed + 1 + depth))
                each.guesses = answer[each.generated : each.generated + depth]


def load(config: Path) -> Engine:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(config, Path(folder) / "config.json")
        settings = GpuSettings(max_batch=MAX_BATCH, chunk_tokens=CHUNK_TOKENS, guesses=True)
        return Engine.load(
            Path(folder),
            device="cuda",
            dtype="bfloat16",
            random_weights=True,
            kv_memory=32 << 30,
            gpu=settings,
            max_context=4096,
        )


def prompts_of(engine: Engine, count: int) -> list[list[int]]:
    source = random.Random(count)
    vocabulary = range(engine.architecture.vocabulary_size)
    return [source.choices(vocabulary, k=CONTEXT) for _ in range(count)]


def run(engine: Engine, work: Workload, speculation: Speculation | None) -> Run:
    return DecodeLoop(engine, work, speculation, MAX_BATCH, CHUNK_TOKENS).finish()


def best(engine: Engine, work: Workload, make: Callable[[], Speculation | None]) -> Run:
    repeats = 3 if len(work.prompts) <= 64 else 2
    return min((run(engine, work, make()) for _ in range(repeats)), key=lambda each: each.seconds)


def best_in_turn(
    engine: Engine, work: Workload, make: Callable[[], Speculation]
) -> tuple[Run, Run]:
    """The best run without and with guesses, in turn, so that other load affects both."""
    runs = [(run(engine, work, None), run(engine, work, make())) for _ in range(3)]
    plain, guessing = (min(each, key=lambda one: one.seconds) for each in zip(*runs, strict=True))
    return plain, guessing


@torch.inference_mode()
def device_ms(engine: Engine, prompts: list[list[int]], depth: int) -> float:
    """The time of a recorded step after the prompts, without sampling. Many run in a row, so that
    the host is ahead."""
    runner = engine._runner
    assert isinstance(runner, GpuRunner)
    plan: Plan = {}
    for prompt in prompts:
        pages = engine.pool.pages_for(len(prompt) + depth)
        lease = engine.pool.acquire(pages)
        lease.cover(pages)
        work = Work(AttemptKey("", 0), prompt, Sampling(), ANSWER, frozenset())
        sequence = Sequence(work, lease, computed=len(prompt) - 1, guesses=[0] * depth)
        plan[sequence] = 1
    slots, new_pages = runner._slots.place([each.lease for each in plan])
    arrays = step_arrays(plan, slots, runner._limits)
    runner._decoded(arrays, upload(new_pages, runner._device))
    nothing = upload(new_pages[:0], runner._device)

    def many() -> None:
        for _ in range(MANY):
            runner._decoded(arrays, nothing)

    took = min(event_ms(many) for _ in range(3)) / MANY
    for each in plan:
        each.lease.release()
    return took


def steps(engine: Engine) -> None:
    print(f"{'step':<24}{'plain ms':>10}{'checks ms':>10}{'ratio':>8}{'alone':>16}{'ratio':>8}")
    for batch, depth in STEPS:
        work = Workload(prompts_of(engine, batch), ANSWER)
        plain = run(engine, work, None)
        waiting = best(engine, work, partial(Always, [[]] * batch, 0))
        checking = best(engine, work, partial(Always, plain.answers, depth))
        same(plain, checking)
        device = [device_ms(engine, work.prompts, guesses) for guesses in (0, depth)]
        alone = [each.seconds / each.steps * 1e3 for each in (waiting, checking)]
        print(
            f"{batch} with {depth} guesses{'':<10}"[:24]
            + f"{device[0]:>10.2f}{device[1]:>10.2f}{device[1] / device[0]:>8.3f}"
            + f"{alone[0]:>8.2f}{alone[1]:>8.2f}{alone[1] / alone[0]:>8.3f}",
            flush=True,
        )


def compare(title: str, plain: Run, guessing: Run) -> None:
    same(plain, guessing)
    print(
        f"{title:<24}{plain.rate:>10.1f}{guessing.rate:>10.1f}{guessing.rate / plain.rate:>8.3f}"
        f"{guessing.accepted / max(guessing.guessed, 1):>10.0%}"
        f"{guessing.tokens / max(guessing.steps, 1) / len(plain.answers):>8.2f}"
        f"{guessing.together / plain.together:>10.3f}",
        flush=True,
    )


def same(plain: Run, guessing: Run) -> None:
    if plain.answers != guessing.answers:
        sys.exit("an answer with guesses differs from the one without")


HEAD = f"{'':<24}{'off tok/s':>10}{'on tok/s':>10}{'ratio':>8}{'accepted':>10}{'a step':>8}"
HEAD += f"{'all run':>10}"
"""`all run` is the ratio until the first answer ends, after which fewer streams run."""


def right(engine: Engine) -> None:
    print(f"right {RIGHT:.0%} of the time\n{HEAD}")
    for batch in (1, 8, 32, 64):
        work = Workload(prompts_of(engine, batch), ANSWER)
        plain = best(engine, work, lambda: None)
        compare(f"{batch} streams", plain, best(engine, work, partial(Known, plain.answers)))


def nothing(engine: Engine) -> None:
    print(f"nothing to guess\n{HEAD}")
    for batch in (1, 8, 32, 64, 128, 256):
        sampling = Sampling(temperature=5.0)
        work = Workload(prompts_of(engine, batch), ANSWER, sampling=sampling)
        speculation = partial(Speculation, runs_ahead=True)
        compare(f"{batch} streams", *best_in_turn(engine, work, speculation))


def drafting(drafts: Drafts) -> Callable[[], Speculation]:
    """Measures costs first. These and the shares of right guesses are kept from run to run, as on a
    worker; answers are not."""
    drafts.rehearse()
    return partial(Speculation, drafts, StepCost(runs_ahead=True), runs_ahead=True)


def draft(engine: Engine) -> None:
    assert engine.draft
    vocabulary = engine.architecture.vocabulary_size
    print(f"with a draft model, which is right {RIGHT:.0%} of the time\n{HEAD}")
    for batch in (1, 8, 32):
        work = Workload(prompts_of(engine, batch), ANSWER)
        known = KnownDrafts(engine.draft, run(engine, work, None).answers)
        compare(f"{batch} streams", *best_in_turn(engine, work, drafting(known)))
    print(f"with a draft model, which is wrong\n{HEAD}")
    for batch in (1, 8, 32):
        work = Workload(prompts_of(engine, batch), ANSWER)
        wrong = Drafts(engine.draft, vocabulary, CHUNK_TOKENS)
        compare(f"{batch} streams", *best_in_turn(engine, work, drafting(wrong)))


def load_draft_of(config: Path, main: Engine) -> Engine:
    settings = Config(
        speculation="draft", weights="random", draft_kv_memory=Size(16 << 30), max_context=4096
    )
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(config, Path(folder) / "config.json")
        return load_draft(with_device_defaults(settings, "cuda"), Path(folder), main)


ROWS = {"steps": steps, "right": right, "nothing": nothing, "draft": draft}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--config", type=Path, default=CONFIGS / "llama-3.1-8b.json")
    parser.add_argument("--draft", type=Path, default=CONFIGS / "llama-3.2-1b.json")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    options = parser.parse_args()
    began = time.perf_counter()
    engine = load(options.config)
    print(f"loaded and recorded in {time.perf_counter() - began:.1f} s", flush=True)
    if "draft" in options.rows:
        began = time.perf_counter()
        engine.draft = load_draft_of(options.draft, engine)
        print(f"draft loaded and recorded in {time.perf_counter() - began:.1f} s", flush=True)
    for name in options.rows:
        ROWS[name](engine)


if __name__ == "__main__":
    main()
