"""Tokens of models whose layers differ, against transformers', as two workers compute them: with
the schedulers, page by page, given back and found again."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
from engine_loop import answer
from tiny_models import (
    TINY_MODELS,
    VOCABULARY,
    TinyModel,
    choices_of_transformers,
    generate_with_transformers,
    save,
)

from baton.core.types import AttemptKey, Sampling, Work
from baton.decode_worker.decode_scheduler import DecodeScheduler
from baton.engine.engine import Engine
from baton.engine.model_choice import KvDtype
from baton.engine.page_groups import GroupedPool
from baton.engine.page_pool import PagePool
from baton.engine.sequence import Sequence
from baton.prefill_worker.prefill_scheduler import PrefillScheduler, PrefillSequence

ANSWER = 12
LOCAL, GLOBAL = "sliding_attention", "full_attention"
MODELS = {
    "mistral": TINY_MODELS["mistral-window"],
    "gemma2": TINY_MODELS["gemma2"],
    "gemma3": TINY_MODELS["gemma3"].changed(
        num_hidden_layers=6, layer_types=[LOCAL] * 5 + [GLOBAL]
    ),
}
SIZES = [(1, 7), (4, 32), (16, 5)]
"""Of pages and chunks."""


class Workers:
    """A prefill worker, and a decode worker with so many pages."""

    def __init__(
        self,
        folder: Path,
        page_size: int,
        chunk: int,
        pages: int = 1000,
        kv_dtype: KvDtype = "auto",
    ) -> None:
        load = partial(Engine.load, folder, page_size=page_size, kv_dtype=kv_dtype)
        page = load(kv_memory=1 << 20).kv[0].nbytes
        self.prefill, self.decode = (load(kv_memory=count * page) for count in (1000, pages))
        for engine in (self.prefill, self.decode):
            engine.pool.root = b"root"
        self._chunk = chunk
        self.scheduler = DecodeScheduler(self.decode.pool, max_batch=8, chunk_tokens=chunk)

    def ask(self, name: str, prompt: list[int]) -> Sequence:
        """Computes a prompt here and continues it there. Copies what a transfer lists."""
        work = Work(AttemptKey(name, 0), prompt, Sampling(), ANSWER, frozenset())
        job, token = self._compute(work)
        sequence = Sequence.queued(work, self.decode.pool)
        self.scheduler.reserve(sequence)
        while sequence not in self.scheduler.grant():
            assert self.step(), "a reservation waits for pages, and nothing runs"
        lease = sequence.lease
        listed = job.lease.listed(0, len(job.lease), len(prompt))
        self.decode.kv[lease.fresh] = self.prefill.kv[listed[lease.held_before :]]
        job.lease.release()
        assert self.scheduler.arrive(work.key, token)
        return sequence

    def local(self, name: str, prompt: list[int]) -> Sequence:
        """Queues a request that the decode worker computes alone."""
        work = Work(AttemptKey(name, 0), prompt, Sampling(), ANSWER, frozenset())
        sequence = Sequence.queued(work, self.decode.pool)
        self.scheduler.compute(sequence)
        return sequence

    def _compute(self, work: Work) -> tuple[PrefillSequence, int]:
        pool = self.prefill.pool
        scheduler, job = PrefillScheduler(pool, self._chunk), PrefillSequence.queued(work, pool)
        scheduler.add(job)
        while True:
            (token,) = self.prefill.step(scheduler.next())
            job.settle(job.computed)
            if token is not None:
                assert isinstance(token, int)
                return job, token

    def step(self) -> bool:
        plan = self.scheduler.next()
        for sequence, token in zip(plan, self.decode.step(plan) if plan else (), strict=True):
            sequence.settle(sequence.computed)
            if token is not None and sequence.append(token):
                self.scheduler.remove(sequence)
        assert self.decode.pool.check_integrity() == ""
        return bool(plan)

    def check_idle(self) -> None:
        for engine in (self.prefill, self.decode):
            assert engine.pool.check_integrity(held=0) == ""


def random_prompts(*lengths: int) -> list[list[int]]:
    source = random.Random(7)
    return [[source.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("name", MODELS)
def test_turns_of_a_conversation_answer_as_transformers_does(name: str, tmp_path: Path) -> None:
    """Each prompt has the one before it, with its answer, in the caches."""
    oracle = save(MODELS[name], tmp_path)
    first, second = random_prompts(90, 21)
    for page_size, chunk in SIZES:
        workers = Workers(tmp_path, page_size, chunk)
        prompt = list(first)
        for turn in range(3):
            sequence = workers.ask(str(turn), prompt)
            if turn:
                assert sequence.lease.found > 90 // page_size, "the decode worker has the prefix"
            while workers.step():
                pass
            answer = sequence.tokens[len(prompt) :]
            assert len(answer) == ANSWER
            assert [answer] == choices_of_transformers(oracle, [prompt], [answer]), (
                page_size,
                turn,
            )
            prompt += answer + second
        assert workers.prefill.pool.cache.found > 0
        workers.check_idle()


def test_turns_of_a_conversation_in_codes_answer_as_one_engine_does(tmp_path: Path) -> None:
    save(MODELS["gemma3"], tmp_path)
    alone = Engine.load(tmp_path, kv_memory=16 << 20, kv_dtype="int8")
    first, second = random_prompts(90, 21)
    for page_size, chunk in SIZES:
        workers, prompt = Workers(tmp_path, page_size, chunk, kv_dtype="int8"), list(first)
        for turn in range(3):
            sequence = workers.ask(str(turn), prompt)
            while workers.step():
                pass
            found = sequence.tokens[len(prompt) :]
            assert found == answer(alone, prompt, ANSWER), (page_size, turn)
            prompt += found + second
        assert workers.prefill.pool.cache.found > 0
        workers.check_idle()


@pytest.mark.parametrize("name", MODELS)
def test_preempted_requests_answer_as_transformers_does(name: str, tmp_path: Path) -> None:
    """One finds its pages in the cache again, the other none of them."""
    oracle = save(MODELS[name], tmp_path)
    prompts = random_prompts(60, 57, 41)
    expected = [generate_with_transformers(oracle, prompt, ANSWER) for prompt in prompts]
    for page_size, chunk in SIZES:
        workers = Workers(tmp_path, page_size, chunk)
        sequences = [workers.ask(str(index), prompt) for index, prompt in enumerate(prompts)]
        for flushed in (False, True):
            for _ in range(3):
                workers.step()
            workers.scheduler._preempt_last()
            if flushed:
                workers.decode.pool.lease([], workers.decode.pool.free).release()
            workers.step()
            again = sequences[-1].lease.found
            assert (again == 0) == flushed
        while workers.step():
            pass
        answers = [each.tokens[each.prompt_length :] for each in sequences]
        assert answers == expected, (page_size, chunk)
        workers.check_idle()


@pytest.mark.parametrize("name", MODELS)
def test_a_full_pool_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    """The pools hold one request at a time, and not all pages of its layers with windows."""
    oracle = save(MODELS[name], tmp_path)
    prompts = random_prompts(60, 57, 41)
    expected = [generate_with_transformers(oracle, prompt, ANSWER) for prompt in prompts]
    for page_size, chunk in SIZES:
        workers = Workers(tmp_path, page_size, chunk)
        pool, context = workers.decode.pool, 60 + ANSWER
        least = next(count for count in range(1, 1000) if fits(pool, count, context))
        workers = Workers(tmp_path, page_size, chunk, least)
        sequences = [workers.local(str(index), prompt) for index, prompt in enumerate(prompts)]
        while workers.step():
            pass
        answers = [each.tokens[each.prompt_length :] for each in sequences]
        assert answers == expected, (page_size, chunk)
        workers.check_idle()


def fits(pool: PagePool, count: int, tokens: int) -> bool:
    assert isinstance(pool, GroupedPool)
    return GroupedPool(count, pool.page_size, pool._windows).longest_context(tokens) == tokens


def test_a_prompt_far_beyond_the_windows_needs_few_pages_of_them(tmp_path: Path) -> None:
    model: TinyModel = MODELS["gemma3"].changed(max_position_embeddings=512)
    oracle = save(model, tmp_path)
    (prompt,) = random_prompts(400)
    workers = Workers(tmp_path, 4, 16)
    sequence = workers.ask("long", prompt)
    alike = workers.decode.pool.pages_for(len(prompt)) * workers.decode.pool.slices
    assert workers.decode.pool.leased < alike / 4
    while workers.step():
        pass
    assert sequence.tokens[400:] == generate_with_transformers(oracle, prompt, ANSWER)
    workers.check_idle()
