"""Answers with guessed tokens equal those without, to the last token and log probability."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from random_schemas import random_schema
from rank_threads import split_engine
from speculating import ANSWER, KEY, SAMPLINGS, WARM, Answers, Knowing, Loop, works
from text_model import END, save_text_model, tokenizer
from tiny_models import TINY_MODELS, VOCABULARY, generate_with_transformers, save

from baton.core.errors import InvalidGrammar
from baton.core.types import Sampling, Structure, Work
from baton.decode_worker.speculation import Speculation
from baton.decode_worker.step_cost import StepCost
from baton.engine.acceptance import Acceptance
from baton.engine.engine import Engine
from baton.engine.model_choice import WeightQuantization
from baton.engine.page_pool import PagePool
from baton.engine.prompt_lookup import (
    MOST_KEPT,
    MOST_TENANTS,
    PastAnswers,
    PromptLookup,
    new_acceptance,
)
from baton.engine.sequence import Sequence
from baton.router.prompts.output_grammar import grammar_of

MODELS = ("llama", "mistral-window", "gemma2", "qwen3-moe", "deepseek-v3", "gpt-oss")


def alone(engine: Engine, asked: list[Work]) -> Answers:
    return [Loop(engine).answer([each])[0] for each in asked]


def compare(engine: Engine, asked: list[Work], plain: Answers | None = None, **limits: int) -> Loop:
    """Answers alone and plainly, then together with guesses."""
    plain = plain or alone(engine, asked)
    for wrong in (0.0, 0.3, 1.0):
        guessing = Loop(engine, Knowing(plain, wrong, VOCABULARY), **limits)
        assert guessing.answer(asked) == plain, wrong
        assert guessing.guesses
        if wrong < 1.0:
            assert guessing.accepted
    looking = Loop(engine, Speculation(), **limits)
    assert looking.answer(asked) == plain
    return looking


@pytest.mark.parametrize(
    ("name", "page_size"), list(zip(MODELS, itertools.cycle((1, 16)), strict=False))
)
def test_any_model_and_sampling_answers_as_without(
    name: str, page_size: int, tmp_path: Path
) -> None:
    oracle = save(TINY_MODELS[name], tmp_path)
    engine = Engine.load(tmp_path, page_size=page_size, kv_memory=4 << 20)
    asked = works(SAMPLINGS)
    compare(engine, asked)
    greedy = Loop(engine, Speculation()).answer(asked[:1])[0][0]
    assert greedy == generate_with_transformers(oracle, list(asked[0].prompt_tokens), ANSWER)


def test_models_over_codes_answer_as_without(tmp_path: Path) -> None:
    options: dict[str, WeightQuantization] = {"gemma2": "int8", "qwen3-moe": "none"}
    for name, quantization in options.items():
        save(TINY_MODELS[name], tmp_path / name)
        engine = Engine.load(
            tmp_path / name, kv_memory=4 << 20, kv_dtype="int8", quantization=quantization
        )
        compare(engine, works(SAMPLINGS))


def test_stop_tokens_batch_limits_and_chunks_are_kept_to(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    engine = Engine.load(tmp_path, page_size=4, kv_memory=4 << 20)
    asked = works([*SAMPLINGS, *SAMPLINGS], frozenset(range(0, VOCABULARY, 9)))
    plain = alone(engine, asked)
    for max_batch, chunk_tokens in ((3, 5), (20, 40), (64, 256)):
        loop = compare(engine, asked, plain, max_batch=max_batch, chunk_tokens=chunk_tokens)
        assert loop.most_guesses < max_batch


def test_prompts_are_scored_beside_guesses_as_without(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    engine = Engine.load(tmp_path, page_size=4, kv_memory=4 << 20)
    asked = [
        replace(each, prompt_logprobs=2 if number % 2 else None)
        for number, each in enumerate(works([*SAMPLINGS, *SAMPLINGS]))
    ]
    compare(engine, asked, max_batch=40, chunk_tokens=9)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_preempted_requests_answer_as_without(name: str, tmp_path: Path) -> None:
    save(TINY_MODELS[name], tmp_path)
    engine = Engine.load(tmp_path, page_size=4, kv_memory=4 << 20)
    asked = works(SAMPLINGS)
    plain = alone(engine, asked)
    with engine.pool.lease([], engine.pool.free - 60 * engine.pool.slices):
        loop = Loop(engine, Knowing(plain, 0.3, VOCABULARY))
        assert loop.answer(asked) == plain
        assert loop.preempted
        assert loop.accepted


def test_cached_pages_hold_only_tokens_that_were_drawn(tmp_path: Path) -> None:
    """A second turn finds the pages of an answer that had many wrong guesses."""
    save(TINY_MODELS["llama"], tmp_path)
    engine = Engine.load(tmp_path, page_size=2, kv_memory=4 << 20)
    first = works([WARM])
    plain = Loop(engine).answer(first)
    second = Work(KEY, [*first[0].prompt_tokens, *plain[0][0], 5, 6], WARM, ANSWER, frozenset())
    expected = Loop(engine).answer([second])
    engine.pool.root = b"root"
    assert Loop(engine, Knowing(plain, 0.7, VOCABULARY)).answer(first) == plain
    found = engine.pool.cache.found
    assert Loop(engine, Speculation()).answer([second]) == expected
    assert engine.pool.cache.found - found >= (len(second.prompt_tokens) - 4) // 2


class AssumedCost(Speculation):
    """Plans with the assumed costs of steps, whatever else this machine does."""

    def note_step(self, rows: int, seconds: float, waited: bool = False) -> None:
        pass


def test_a_prediction_changes_no_answer_and_is_accepted_as_far_as_it_is_right(
    tmp_path: Path,
) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    engine = Engine.load(tmp_path, kv_memory=4 << 20)
    (work,) = works([WARM])
    plain = Loop(engine).answer([work])
    accepted = []
    for right in (0, ANSWER // 2, ANSWER):
        wrong = [(token + 1) % VOCABULARY for token in plain[0].tokens[right:]]
        prediction = [*plain[0].tokens[:right], *wrong]
        loop = Loop(engine, AssumedCost())
        assert loop.answer([replace(work, prediction=prediction)]) == plain
        accepted.append(loop.accepted)
    assert accepted[0] < accepted[1] < accepted[2]


@pytest.mark.parametrize("seed", range(3))
def test_answers_with_a_grammar_are_as_without(seed: int, tmp_path: Path) -> None:
    save_text_model(tmp_path)
    engine = Engine.load(tmp_path, kv_memory=64 << 20)
    stops = frozenset({tokenizer().token_to_id(END)})
    draw = random.Random(seed)
    asked = [
        Work(
            KEY,
            [3, 50, 7],
            sampling,
            60,
            stops,
            logprobs=1,
            grammar=grammar_of(Structure("json_schema", json.dumps(random_schema(draw)))),
        )
        for sampling in SAMPLINGS
    ]
    compare(engine, asked)


def test_a_wrong_guess_that_breaks_the_model_fails_no_request(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    broken = 11
    engine = Engine.load(tmp_path, kv_memory=4 << 20)
    asked = [each for each in works([Sampling()] * 4) if broken not in each.prompt_tokens]
    plain = Loop(engine).answer(asked)
    assert all(broken not in tokens for tokens, *_ in plain)
    engine._runner._model.embedding[broken] = float("nan")  # type: ignore[attr-defined]

    class Breaking(Knowing):
        def _maybe_wrong(self, token: int) -> int:
            return broken

    assert Loop(engine, Breaking(plain, 1.0, VOCABULARY)).answer(asked) == plain


def test_two_ranks_answer_as_without(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    with split_engine(tmp_path, 2, tmp_path) as split:
        compare(split.engine, works(SAMPLINGS[:4]))


def test_a_model_of_transformers_answers_as_without(tmp_path: Path) -> None:
    save(TINY_MODELS["gemma2"], tmp_path)
    engine = Engine.load(tmp_path, kv_memory=4 << 20, engine="transformers")
    asked = [replace(each, logprobs=None) for each in works(SAMPLINGS)]
    compare(engine, asked)


def test_guesses_wait_for_no_grammar_and_leave_its_error_to_the_step(tmp_path: Path) -> None:
    save_text_model(tmp_path)
    engine = Engine.load(tmp_path, kv_memory=64 << 20)
    guide = engine.guide(replace(works([WARM])[0], grammar="no grammar"))
    assert guide is not None
    guide.follow([])
    with pytest.raises(InvalidGrammar):
        guide.mask()
    assert guide.look_ahead([1, 2]) == []


def test_by_default_tokens_are_guessed_where_rows_are_independent(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    for dtype, engine, expected in (
        ("float32", "native", True),
        ("float16", "native", False),
        ("float32", "transformers", False),
    ):
        loaded = Engine.load(tmp_path, dtype=dtype, engine=engine, kv_memory=1 << 20)
        assert loaded.has_independent_rows is expected


def lookup_of(tokens: list[int], seen: Acceptance | None = None) -> PromptLookup:
    return PromptLookup(tokens, len(tokens), seen=seen)


def test_what_repeats_is_guessed_and_pays() -> None:
    text = list(range(10, 40))
    lookup = lookup_of([*text, 1, 2, 3])
    assert lookup.offer(4).guesses == []
    tokens = [*text, 1, 2, 3, *text[:4]]
    lookup = lookup_of(tokens)
    assert lookup.offer(3).guesses == text[4:7]
    chances = []
    for token in text[4:20]:
        chances.append(lookup.offer(1).chances[0])
        tokens.append(token)
        lookup.follow()
        assert lookup.offer(1).guesses == [token + 1]
    assert chances[-1] > 0.9 > chances[0]


def test_a_wrong_guess_lowers_the_chance_of_the_next() -> None:
    tokens = [1, 2, 3, 1, 2]
    lookup = lookup_of(tokens)
    before = lookup.offer(1).chances[0]
    for token in (4, 1, 2, 5, 1, 2):
        tokens.append(token)
        lookup.follow()
    assert lookup.offer(1).chances[0] < before / 2


def test_a_match_that_reaches_the_end_goes_round() -> None:
    assert lookup_of([7, 8, 9, 7, 8, 9, 7, 8]).offer(7).guesses == [9, 7, 8, 9, 7, 8, 9]


def test_an_index_grown_token_by_token_is_that_of_a_whole_prompt() -> None:
    draw = random.Random(0)
    tokens = [draw.randrange(6) for _ in range(300)]
    grown_tokens = tokens[:1]
    grown = lookup_of(grown_tokens)
    for token in tokens[1:]:
        grown_tokens.append(token)
        grown.follow()
    whole = lookup_of(tokens)
    assert grown._own.tokens == whole._own.tokens == tokens
    assert grown._own._places == whole._own._places


def test_a_tenants_past_answers_are_guessed_and_nobody_elses() -> None:
    pool, speculation = PagePool(100, 4), Speculation()
    answer = [1, 2, 3, 4, *range(60, 70)]
    for tenant, prompt in (("a", [1, 2, 3, 4]), ("a", [9, 2, 3, 4]), ("b", [1, 2, 3, 4])):
        work = Work(KEY, prompt, Sampling(), 30, frozenset(), cache_salt=tenant)
        sequence = Sequence(work, pool.acquire(1))
        guesses = speculation._found(sequence).guesses
        sequence.append(*answer)
        speculation.end(sequence)
        assert guesses == []
    for tenant, expected in (("a", answer), ("b", answer), ("c", [])):
        work = Work(KEY, [7, 7, 1, 2, 3, 4], Sampling(), 30, frozenset(), cache_salt=tenant)
        guesses = speculation._found(Sequence(work, pool.acquire(1))).guesses
        assert guesses == expected[4:], tenant


def test_a_prediction_is_guessed_from_its_start_and_found_again_after_a_change() -> None:
    prediction = list(range(100, 130))
    tokens = [1, 2, 3]
    lookup = PromptLookup(tokens, len(tokens), prediction)
    assert lookup.offer(4).guesses == prediction[:4]
    tokens += [*prediction[:10], 7, *prediction[11:13]]
    lookup.follow()
    assert lookup.offer(20).guesses == [*prediction[13:], 1, 2, 3]
    resumed = PromptLookup(tokens, 3, prediction)
    assert resumed.offer(5).guesses == prediction[13:18]


def test_past_answers_are_bounded() -> None:
    past = PastAnswers()
    draw = random.Random(0)
    for number in range(100):
        tokens = [draw.randrange(1000) for _ in range(draw.choice((10, 3000, 9000)))]
        past.add(str(number % 40), tokens)
        assert past.of(str(number % 40))[0].tokens[-10:] == tokens[-10:]
    kept = [past.of(str(tenant)) for tenant in range(40)]
    assert sum(map(bool, kept)) == MOST_TENANTS
    assert all(len(each) <= 2 for each in kept)
    assert all(len(text.tokens) <= MOST_KEPT for each in kept for text in each)


def test_what_earlier_sequences_guessed_wrong_is_not_tried_again() -> None:
    seen = new_acceptance()
    tokens = [1, 2, 3, 1, 2]
    lookup = lookup_of(tokens, seen)
    before = lookup_of([1, 2, 3, 1, 2], seen).offer(1).chances[0]
    for token in (4, 1, 2, 5, 1, 2, 6, 1, 2, 7, 1, 2):
        tokens.append(token)
        lookup.follow()
    assert lookup_of([1, 2, 3, 1, 2], seen).offer(1).chances[0] < before / 2


def test_the_first_step_with_a_number_of_rows_is_not_measured() -> None:
    """It is recorded, which takes longer than any step after it."""
    cost = StepCost()
    for rows in (8, 8, 16):
        cost.note(rows, 0.02)
    assumed = cost.seconds(16)
    assert cost.most_rows(8) == 32
    cost.note(16, 0.03)
    assert cost.seconds(16) != assumed


def test_guesses_fill_blocks_of_rows_even_if_the_first_ones_do_not_pay() -> None:
    """With 9 to 16 rows a step takes 1.9 times as long as with 8, with 32 rows 2.4 times."""
    cost, sequences = StepCost(), [Mock(name=str(number)) for number in range(8)]
    for _ in range(20):
        for rows, seconds in ((8, 0.01), (16, 0.019), (32, 0.024)):
            cost.note(rows, seconds)
    speculation = Speculation(cost=cost)
    likely = [(0.85**depth, each) for each in sequences for depth in range(1, 10)]
    depths = speculation._depths(likely, sequences, 8, 64)
    assert set(depths.values()) == {3}
    unlikely = [(0.3**depth, each) for each in sequences for depth in range(1, 10)]
    assert not speculation._depths(unlikely, sequences, 8, 64)
