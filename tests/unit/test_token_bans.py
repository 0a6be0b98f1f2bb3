"""Banned tokens against transformers' logits processors."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from text_model import END, save_text_model, tokenizer
from transformers import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from baton.core.types import AttemptKey, Sampling, Structure, Work
from baton.core.wire import work_from, work_to
from baton.engine.engine import Engine
from baton.engine.gpu.sampler import GpuSampler
from baton.engine.page_pool import PagePool
from baton.engine.sampler import Sampler, banned_tokens
from baton.engine.sequence import Sequence
from baton.router.prompts.output_grammar import grammar_of

POOL = PagePool(0, 16)
VOCABULARY = 7
ENDS = [5, 6]

WORDS = [[2], [0, 3], [1, 1], [3, 2, 1], [0, 1, 2, 3, 4]]
KINDS: dict[str, dict[str, Any]] = {
    "suppressed": {"suppress_tokens": (1, 4)},
    "suppressed at first": {"begin_suppress_tokens": (0, 3)},
    "bad words": {"bad_words_ids": tuple(map(tuple, WORDS))},
    "least answer": {"min_tokens": 4},
    "least length": {"min_length": 9},
    **{f"{size}-grams": {"no_repeat_ngram_size": size} for size in (1, 2, 3, 5)},
}


def oracle(kind: str, prompt: int) -> LogitsProcessor:
    match kind:
        case "suppressed":
            return SuppressTokensLogitsProcessor([1, 4])
        case "suppressed at first":
            return SuppressTokensAtBeginLogitsProcessor([0, 3], prompt)
        case "bad words":
            return NoBadWordsLogitsProcessor(WORDS, ENDS)
        case "least answer":
            return MinNewTokensLengthLogitsProcessor(prompt, 4, torch.tensor(ENDS))
        case "least length":
            return MinLengthLogitsProcessor(9, torch.tensor(ENDS))
        case _:
            return NoRepeatNGramLogitsProcessor(int(kind[0]))


def sequence(sampling: Sampling, prompt: list[int], answer: list[int]) -> Sequence:
    work = Work(AttemptKey("r", 0), prompt, sampling, 100, frozenset(ENDS))
    return Sequence(work_from(work_to(work)), POOL.acquire(0), [*prompt, *answer])


def ruled_out(processor: LogitsProcessor, tokens: list[int]) -> list[int]:
    scores = processor(torch.tensor([tokens]), torch.zeros(1, VOCABULARY))
    return (scores[0] == -torch.inf).nonzero()[:, 0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_the_banned_tokens_are_transformers(kind: str) -> None:
    draw = random.Random(kind)
    sizes = set()
    for _ in range(300):
        known = range(draw.choice((2, 5)))
        prompt = draw.choices(known, k=draw.randint(1, 8))
        answer = draw.choices(known, k=draw.randint(0, 8))
        wanted = ruled_out(oracle(kind, len(prompt)), prompt + answer)
        if len(wanted) == VOCABULARY:
            continue
        banned = banned_tokens(sequence(Sampling(**KINDS[kind]), prompt, answer), VOCABULARY)
        assert banned.tolist() == wanted
        sizes.add(len(wanted))
    assert len(sizes) > (kind != "suppressed")


@pytest.mark.parametrize("kind", KINDS)
def test_a_continued_answer_has_the_same_bans(kind: str) -> None:
    """Another attempt reads what was answered as part of its prompt."""
    draw = random.Random(kind)
    for _ in range(100):
        prompt = draw.choices(range(5), k=draw.randint(1, 6))
        answer = draw.choices(range(5), k=draw.randint(1, 6))
        whole = sequence(Sampling(**KINDS[kind]), prompt, answer)
        emitted = draw.randint(1, len(answer))
        work = replace(
            whole.work, prompt_tokens=[*prompt, *answer[:emitted]], answer_tokens=emitted
        )
        continued = Sequence(work, POOL.acquire(0), [*prompt, *answer])
        assert banned_tokens(continued, 7).tolist() == banned_tokens(whole, 7).tolist()


def test_tokens_still_in_flight_count() -> None:
    """On a GPU the host plans a step before it has seen the last token."""
    least = sequence(Sampling(min_tokens=2, begin_suppress_tokens=(1,)), [3], [])
    assert banned_tokens(least, VOCABULARY).tolist() == [1, *ENDS]
    least.expected = 1
    assert banned_tokens(least, VOCABULARY).tolist() == ENDS
    least.append(0)
    assert banned_tokens(least, VOCABULARY).tolist() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_ban_that_needs_the_last_token_waits_for_it(kind: str) -> None:
    waiting = sequence(Sampling(**KINDS[kind]), [3], [])
    waiting.expected = 1
    assert waiting.planned_out == ("gram" in kind or kind == "bad words")


def test_ids_outside_the_vocabulary_have_no_effect() -> None:
    assert banned_tokens(sequence(Sampling(suppress_tokens=(2, 900)), [1], []), 7).tolist() == [2]


def test_a_ban_of_everything_is_lifted() -> None:
    everything = Sampling(suppress_tokens=tuple(range(VOCABULARY)))
    assert Sampler(VOCABULARY).sample(torch.arange(7.0)[None], [sequence(everything, [1], [])]) == [
        6
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_both_samplers_leave_banned_tokens_out(temperature: float, device: torch.device) -> None:
    """Alone and in company."""
    sequences = [
        sequence(
            Sampling(temperature, seed=seed, **kind, repetition_penalty=1 + seed % 2), [1, 0], [0]
        )
        for seed in range(16)
        for kind in ({}, *KINDS.values())
    ]
    logits = torch.randn(len(sequences), VOCABULARY, generator=torch.Generator().manual_seed(0))
    tokens = Sampler(VOCABULARY).sample(logits, sequences)
    assert GpuSampler(VOCABULARY).sample(logits.to(device), sequences).tolist() == tokens
    for row, (each, token) in enumerate(zip(sequences, tokens, strict=True)):
        assert token not in banned_tokens(each, VOCABULARY)
        assert Sampler(VOCABULARY).sample(logits[row : row + 1], [each]) == [token]


@pytest.mark.parametrize(
    "bans", [{"no_repeat_ngram_size": 1}, {"min_tokens": 50}, {"bad_words_ids": ((4, 4),)}]
)
def test_a_grammar_is_followed_whatever_is_banned(bans: dict[str, Any], tmp_path: Path) -> None:
    save_text_model(tmp_path)
    engine, words = Engine.load(tmp_path, kv_memory=16 << 20), tokenizer()
    end = words.token_to_id(END)
    grammar = grammar_of(Structure("regex", "(ab|ba){6}"))
    work = Work(
        AttemptKey("r", 1), [3, 50, 7], Sampling(**bans), 99, frozenset({end}), grammar=grammar
    )
    made = Sequence(work, engine.pool.acquire(engine.pool.pages_for(103)))
    made.set_guide(engine.guide(work))
    finish = None
    while finish is None:
        (token,) = engine.step({made: made.uncomputed})
        assert isinstance(token, int), token
        finish = made.append(token)
    answer = words.decode(made.tokens[3:])
    assert re.fullmatch("(ab|ba){6}", answer)
