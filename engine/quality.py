"""Measures what a model loses by its dtype or quantization, on a fixed text, against float32.

The text is a story (quality.txt) with inserted facts, which are repeated at its end. Both models
prefill it, so each token is predicted from the same tokens before it. The story's tokens are
compared by depth. A fact is recalled if each token of its number is the likeliest one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as ListLike
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from baton.core.errors import InvalidConfig
from baton.core.tokenizer_files import tokenizer_text
from baton.core.types import AttemptKey, Logprobs, Sampling, Work
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence

STORY = Path(__file__).with_name("quality.txt")
FACT = " The number of the {} box is"
FACTS = {"red": 4172, "green": 9036, "blue": 2518, "white": 7843, "black": 6391, "brown": 5207}
"""In the order of the text. At its end they are repeated in the order of their names."""

DEPTHS = (0, 256, 1024, 2048)
CHUNK_TOKENS = 256
KV_MEMORY = 2 << 30
WORST = 0.999


class Exam(NamedTuple):
    tokens: list[int]
    story: list[int]  # positions of the tokens that are compared
    numbers: list[range]  # positions of each fact's number, where it is repeated


class TextQuality(NamedTuple):
    """The quality of the story's tokens from position `start` up to `end`."""

    start: int
    end: int
    tokens: int
    perplexity: float
    perplexity_change: float  # 0.01: 1% more than in float32
    mean_change: float  # of log probabilities, in absolute numbers
    worst_change: float  # 99.9th percentile of the same
    top_agreement: float  # share of tokens with the same likeliest token in their place


class Quality(NamedTuple):
    overall: TextQuality
    by_depth: list[TextQuality]
    recalled: int  # facts
    recalled_in_float32: int
    facts: int


def measure(folder: Path, device: str, **kept: Any) -> Quality:
    """Measures the model in `folder`, loaded with the options `kept` of Engine.load. Before that
    it is loaded in float32."""
    exam = make_exam(folder)
    reference, scores = (
        score_loaded(folder, exam.tokens, device=device, **options)
        for options in ({"dtype": "float32"}, kept)
    )
    return compare(exam, scores, reference)


def make_exam(folder: Path) -> Exam:
    """Makes the exam in the tokens of the model in `folder`."""
    tokenizer = Tokenizer.from_str(tokenizer_text(folder))
    tokenizer.no_truncation()
    encode = partial(tokenizer.encode, add_special_tokens=False)
    tokens: list[int] = tokenizer.encode("").ids  # the first token, if the model has one
    story: list[int] = []
    paragraphs = STORY.read_text(encoding="utf-8").split("\n\n")
    facts = iter(FACTS)
    for index, paragraph in enumerate(paragraphs):
        ids = encode(paragraph + "\n\n").ids
        story += range(max(len(tokens), 1), len(tokens) + len(ids))
        tokens += ids
        if index % (len(paragraphs) // len(FACTS)) == 0 and (fact := next(facts, None)):
            tokens += encode(f"Note:{FACT.format(fact)} {FACTS[fact]}.\n\n").ids
    tokens += encode("These are the numbers again.").ids
    numbers = []
    for fact in sorted(FACTS):
        tokens += encode(FACT.format(fact)).ids
        ids = encode(f" {FACTS[fact]}").ids
        numbers.append(range(len(tokens), len(tokens) + len(ids)))
        tokens += [*ids, *encode(".").ids]
    return Exam(tokens, story, numbers)


def score_loaded(folder: Path, tokens: list[int], **options: Any) -> list[Logprobs]:
    engine = Engine.load(folder, kv_memory=KV_MEMORY, **options)
    if len(tokens) >= engine.context_length:
        raise InvalidConfig(
            f"the text has {len(tokens)} tokens, and the model's context is"
            f" {engine.context_length}",
            field="model",
        )
    return score(engine, tokens)


def score(engine: Engine, tokens: list[int]) -> list[Logprobs]:
    """The log probability of each token from the second on, and the likeliest token in its
    place."""
    work = Work(AttemptKey("quality", 0), tokens, Sampling(), 1, frozenset(), prompt_logprobs=1)
    sequence = Sequence(work, engine.pool.acquire(engine.pool.pages_for(len(tokens) + 1)))
    try:
        while len(sequence.prompt_scores) < len(tokens) - 1:
            count = min(CHUNK_TOKENS, sequence.uncomputed)
            sequence.lease.cover(engine.pool.pages_for(sequence.computed + count))
            engine.step({sequence: count})
            sequence.lease.advance(sequence.computed)
    finally:
        sequence.lease.release()
    return sequence.prompt_scores


def compare(exam: Exam, scores: list[Logprobs], reference: list[Logprobs]) -> Quality:
    """Compares `scores` with `reference`, those of the same model in float32."""
    depths = [*(depth for depth in DEPTHS if depth < len(exam.tokens)), len(exam.tokens)]
    compared = partial(_compare_span, exam, scores, reference)
    return Quality(
        compared(0, len(exam.tokens)),
        [compared(start, end) for start, end in pairwise(depths)],
        _recalled(exam, scores),
        _recalled(exam, reference),
        len(exam.numbers),
    )


def _compare_span(
    exam: Exam, scores: list[Logprobs], reference: list[Logprobs], start: int, end: int
) -> TextQuality:
    places = [at - 1 for at in exam.story if start <= at < end]
    pairs = [(scores[at], reference[at]) for at in places]
    changes = sorted(abs(ours.logprob - theirs.logprob) for ours, theirs in pairs)
    perplexities = [
        math.exp(-_mean([each.logprob for each in some])) for some in zip(*pairs, strict=True)
    ]
    return TextQuality(
        start,
        end,
        len(places),
        perplexities[0],
        perplexities[0] / perplexities[1] - 1,
        _mean(changes),
        changes[math.ceil(WORST * len(changes)) - 1],
        _mean([ours.top_token_ids == theirs.top_token_ids for ours, theirs in pairs]),
    )


def _recalled(exam: Exam, scores: list[Logprobs]) -> int:
    return sum(
        all(scores[at - 1].top_token_ids[0] == exam.tokens[at] for at in number)
        for number in exam.numbers
    )


def _mean(numbers: ListLike[float]) -> float:
    return sum(numbers) / len(numbers)
