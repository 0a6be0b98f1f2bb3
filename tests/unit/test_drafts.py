"""Answers with a draft model's guesses equal those without, and the draft's pages come back."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from draft_models import Drafting, draft_cost, main_cost, save_draft
from random_schemas import random_schema
from rank_threads import split_engine
from speculating import ANSWER, KEY, SAMPLINGS, WARM, Answers, Loop, works
from text_model import END, save_text_model, tokenizer
from tiny_models import TINY_MODELS, VOCABULARY, save

from baton.core.types import Sampling, Structure, Work
from baton.decode_worker.draft_pricing import Pace, Pricing
from baton.decode_worker.drafts import Drafts
from baton.decode_worker.speculation import MOST_GUESSES, Speculation
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from baton.router.prompts.output_grammar import grammar_of

NOISE = 0.02
MODELS = {"llama": "llama", "gemma2": "gemma2", "deepseek-v3": "llama", "qwen3-moe": "qwen3-moe"}


def load(folder: Path, **options: object) -> Engine:
    options = {"page_size": 4, "kv_memory": 8 << 20, **options}
    engine = Engine.load(folder, **options)  # type: ignore[arg-type]
    engine.pool.root = b"root"
    return engine


def plainly(engine: Engine, asked: list[Work]) -> Answers:
    """Each answered alone."""
    return [Loop(engine).answer([each])[0] for each in asked]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answers]:
    """A model's folder, and its plain answers to `works(SAMPLINGS)`."""
    folder = tmp_path_factory.mktemp("llama")
    save(TINY_MODELS["llama"], folder)
    return folder, plainly(load(folder), works(SAMPLINGS))


@pytest.mark.parametrize("name", MODELS)
def test_any_model_and_sampling_answers_as_without(name: str, tmp_path: Path) -> None:
    save(TINY_MODELS[name], tmp_path / "model")
    save(TINY_MODELS[MODELS[name]], tmp_path / "other")
    engine, asked = load(tmp_path / "model"), works(SAMPLINGS)
    plain = plainly(engine, asked)
    save_draft(tmp_path / "other", tmp_path / "draft", NOISE)
    loop = Drafting(engine, load(tmp_path / "draft"))
    assert loop.answer(asked) == plain
    assert loop.guesses > loop.accepted > 0


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_draft_that_is_the_model_is_right_about_everything(name: str, tmp_path: Path) -> None:
    """Penalties, bans, seeds and grammars are the draft's too."""
    save(TINY_MODELS[name], tmp_path)
    engine, draft, asked = load(tmp_path), load(tmp_path, page_size=2), works(SAMPLINGS)
    plain = plainly(engine, asked)
    loop = Drafting(engine, draft)
    assert loop.answer(asked) == plain
    assert loop.guesses == loop.accepted > len(asked) * ANSWER // 2
    assert draft.pool.cache.found == 0
    again = Drafting(engine, draft)
    assert again.answer(asked) == plain
    assert again.guesses == again.accepted, "with cached prefixes"
    assert draft.pool.cache.found > 0


def test_stop_tokens_batch_limits_and_chunks_are_kept_to(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    engine = load(tmp_path)
    asked = works([*SAMPLINGS, *SAMPLINGS], frozenset(range(0, VOCABULARY, 9)))
    plain = plainly(engine, asked)
    for max_batch, chunk_tokens in ((3, 5), (20, 40), (64, 256)):
        loop = Drafting(engine, load(tmp_path), max_batch=max_batch, chunk_tokens=chunk_tokens)
        assert loop.answer(asked) == plain
        assert loop.most_guesses < max_batch


def test_preempted_requests_answer_as_without(llama: tuple[Path, Answers]) -> None:
    folder, plain = llama
    engine, draft, asked = load(folder), load(folder), works(SAMPLINGS)
    with engine.pool.lease([], engine.pool.free - 40):
        loop = Drafting(engine, draft)
        assert loop.answer(asked) == plain
    assert loop.preempted
    assert loop.guesses == loop.accepted > 0


@pytest.mark.parametrize("pages", [3, 12, 40])
def test_a_full_pool_of_the_draft_costs_guesses_alone(
    pages: int, llama: tuple[Path, Answers]
) -> None:
    folder, plain = llama
    engine, draft, asked = load(folder), load(folder), works(SAMPLINGS)
    with draft.pool.lease([], draft.pool.free - pages):
        loop = Loop(
            engine, Speculation(Drafts(draft, VOCABULARY, 64, cost=draft_cost()), main_cost())
        )
        assert loop.answer(asked) == plain
        assert draft.pool.leased == draft.pool.total - pages
    assert loop.guesses


def test_a_continued_answer_is_followed_from_its_start(llama: tuple[Path, Answers]) -> None:
    """As after a migration: the tokens of earlier attempts stand in the prompt."""
    folder, plain = llama
    engine, asked = load(folder), works(SAMPLINGS)
    moved = [
        replace(work, prompt_tokens=[*work.prompt_tokens, *tokens[:9]], answer_tokens=9)
        for work, (tokens, *_) in zip(asked, plain, strict=True)
    ]
    loop = Drafting(engine, load(folder))
    assert [each.tokens for each in loop.answer(moved)] == [each.tokens for each in plain]
    assert loop.guesses == loop.accepted > 0


@pytest.mark.parametrize("seed", range(2))
def test_answers_with_a_grammar_are_as_without(seed: int, tmp_path: Path) -> None:
    save_text_model(tmp_path / "model")
    engine = load(tmp_path / "model", kv_memory=64 << 20)
    stops = frozenset({tokenizer().token_to_id(END)})
    draw = random.Random(seed)
    schemas = [json.dumps(random_schema(draw)) for _ in SAMPLINGS]
    asked = [
        Work(KEY, [3, 50, 7], sampling, 60, stops, grammar=grammar_of(Structure("json_schema", s)))
        for sampling, s in zip(SAMPLINGS, schemas, strict=True)
    ]
    plain = plainly(engine, asked)
    for noise in (0.0, NOISE):
        save_draft(tmp_path / "model", tmp_path / f"draft{noise}", noise)
        loop = Drafting(engine, load(tmp_path / f"draft{noise}", kv_memory=64 << 20))
        assert loop.answer(asked) == plain
        assert loop.accepted


def test_two_ranks_and_models_over_codes_answer_as_without(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    asked, draft = works(SAMPLINGS[:4]), load(tmp_path, quantization="int8", kv_dtype="int8")
    with split_engine(tmp_path, 2, tmp_path) as split:
        plain = plainly(split.engine, asked)
        assert Drafting(split.engine, draft).answer(asked) == plain
    engine = load(tmp_path, quantization="int8", kv_dtype="int8")
    plain = plainly(engine, asked)
    loop = Drafting(engine, draft)
    assert loop.answer(asked) == plain
    assert loop.guesses == loop.accepted > 0


def test_a_draft_that_breaks_fails_no_request(llama: tuple[Path, Answers]) -> None:
    folder, plain = llama
    engine, draft, asked = load(folder), load(folder), works(SAMPLINGS)
    draft._runner._model.embedding[7:90] = float("nan")  # type: ignore[attr-defined]
    assert Drafting(engine, draft).answer(asked) == plain


def test_a_draft_knows_fewer_tokens_or_a_shorter_context(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path / "model")
    save(TINY_MODELS["llama"].changed(vocab_size=VOCABULARY - 40), tmp_path / "fewer")
    engine, asked = load(tmp_path / "model"), works(SAMPLINGS, answer=30)
    plain = plainly(engine, asked)
    for draft in (load(tmp_path / "fewer"), load(tmp_path / "model", max_context=40)):
        loop = Drafting(engine, draft)
        assert loop.answer(asked) == plain
        assert loop.guesses


def test_over_many_draws_the_distribution_is_the_models(tmp_path: Path) -> None:
    """Of the second token, which is the first that can be guessed, whatever the first one is."""
    draws, prompt = 3000, [5, 17, 40]
    oracle = save(TINY_MODELS["llama"], tmp_path / "model")
    draft = save_draft(tmp_path / "model", tmp_path / "draft", NOISE)
    loop = Drafting(load(tmp_path / "model"), load(draft), max_batch=150)
    asked = [
        Work(KEY, prompt, Sampling(temperature=1.0, seed=seed), 3, frozenset())
        for seed in range(draws)
    ]
    parts = [asked[start : start + 50] for start in range(0, draws, 50)]
    drawn = torch.tensor([each.tokens[1] for part in parts for each in loop.answer(part)])
    assert loop.guesses > loop.accepted > draws // 4
    with torch.inference_mode():
        first = oracle(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
        after = torch.tensor([[*prompt, token] for token in range(VOCABULARY)])
        expected = draws * first @ oracle(after).logits[:, -1].double().softmax(-1)
    found = drawn.bincount(minlength=VOCABULARY).double()
    rare = expected < 5  # together, as the test's approximation asks for
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    found = torch.cat((found[~rare], found[rare].sum()[None]))
    squares = ((found - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(expected) - 1.0, dtype=torch.float64)
    assert torch.special.gammaincc(freedom / 2, squares / 2) > 0.001


def test_a_draft_that_costs_as_much_as_the_model_is_tried_and_left(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    engine, asked = load(tmp_path), works(SAMPLINGS)
    loop = Drafting(engine, load(tmp_path), step=2e-2)
    loop.answer(asked)
    assert loop.guesses <= len(asked) * 2


@pytest.mark.parametrize(
    ("chances", "step", "row", "expected"),
    [
        ([0.9], 0.3, 0.01, 1),  # 0.9 tokens in 0.32 steps
        ([0.9], 0.95, 0.01, 0),
        ([0.9, 0.9, 0.9], 0.95, 0.01, 0),  # 3 tokens a step without: 2.7 in 1.01 steps
        ([0.9, 0.9, 0.9], 0.7, 0.01, 3),
        ([0.9, 0.01, 0.9], 0.3, 0.01, 2),  # a row costs more than the unlikely one brings
        ([], 0.3, 0.01, 0),
    ],
)
def test_a_round_is_run_where_it_pays(
    chances: list[float], step: float, row: float, expected: int, tmp_path: Path
) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    cost = draft_cost()
    cost._prior = [0.0, step, row, row]
    going = {Loop(load(tmp_path))._begin(works([WARM])[0]): each for each in chances}
    chosen, pace = Pricing(cost).choose(going, Pace(len(chances), 1.0, 0.01))
    assert len(chosen) == expected
    assert pace.seconds == pytest.approx(1.0 + (step + 0.02 * expected if expected else 0.0))


def test_most_guesses_of_a_step_are_bounded(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    engine = load(tmp_path)
    loop = Drafting(engine, load(tmp_path), max_batch=100)
    loop.answer([replace(works([WARM])[0], max_tokens=60)])
    assert loop.most_guesses == MOST_GUESSES


def test_a_device_waits_for_a_draft_where_that_pays_or_is_paid_for(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    engine = load(tmp_path)
    drafts = Drafts(engine, VOCABULARY, 64, cost=draft_cost())
    request = Sequence(works([WARM])[0], engine.pool.lease([]), expected=1)
    wanted, pace = {request: 5}, Pace(1, 0.01, 1e-5, wait=1e-3)
    drafts.pricing.earn(-1e4)
    assert not drafts.waits(wanted, pace), "nothing is on the account"
    drafts.pricing.earn(2e4)
    assert drafts.waits(wanted, pace), "to begin with a request"
    assert not drafts.waits({request: 0}, pace)
    assert drafts.offer(wanted, pace, 8)
    drafts.pricing.earn(-2e4)
    assert drafts.waits(wanted, pace), "guesses bring more"
    assert not drafts.waits(wanted, pace._replace(wait=1.0))
    drafts.drop(request)
    assert not drafts.check()


def test_the_time_of_a_draft_is_not_that_of_steps() -> None:
    drafts = Mock(seconds=0.0)
    speculation = Speculation(drafts, runs_ahead=True)
    for _ in range(50):
        drafts.seconds += 0.5
        speculation.note_step(1, 0.51, waited=True)
        speculation.note_step(1, 0.01)
    assert speculation._cost.seconds(1, waited=True) == pytest.approx(0.01, rel=0.1)
