"""Log probabilities through the whole path, on the embedded model's first layers: transformers'
own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import ProcessCluster
from transformers import AutoModelForCausalLM, PreTrainedModel

MODEL = "shallow"
PROMPT = "The capital of France is"
TOP = 5


@pytest.fixture(scope="module")
def oracle(shallow: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(shallow, dtype=torch.float32)


def expected(oracle: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(dim=-1)


def test_greedy_probabilities_equal_transformers(
    shallow_idle: ProcessCluster, oracle: PreTrainedModel
) -> None:
    with shallow_idle.client() as client:
        prompt = list(client.tokenize(PROMPT).token_ids)
        answer = client.generate(PROMPT, max_tokens=24, logprobs=TOP)
    tokens = list(answer.token_ids)
    wanted = expected(oracle, prompt, tokens)
    best = wanted.topk(TOP)
    assert [each.chosen.token_id for each in answer.logprobs] == tokens
    for place, each in enumerate(answer.logprobs):
        assert each.chosen.logprob == pytest.approx(float(wanted[place, tokens[place]]), abs=1e-4)
        assert [top.token_id for top in each.top] == best.indices[place].tolist()
        told = [top.logprob for top in each.top]
        assert told == pytest.approx(best.values[place].tolist(), abs=1e-4)
    assert b"".join(each.chosen.text for each in answer.logprobs).decode() == answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_echoed_with_transformers_probabilities(
    shallow_idle: ProcessCluster, oracle: PreTrainedModel, stream: bool
) -> None:
    with shallow_idle.client() as client:
        tokens = list(client.tokenize(PROMPT).token_ids)
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 2, "temperature": 0}
    with shallow_idle.sdk() as sdk:
        asked = sdk.completions.create(model=MODEL, stream=stream, **body)  # type: ignore[call-overload]
        choices = [each.choices[0] for each in asked] if stream else [asked.choices[0]]
    text = "".join(each.text for each in choices)
    scores = [each.logprobs for each in choices if each.logprobs]
    told = [number for each in scores for number in each.token_logprobs]
    offsets = [place for each in scores for place in each.text_offset]
    wanted = expected(oracle, tokens[:1], tokens[1:])
    assert told[0] is None
    assert told[1 : len(tokens)] == pytest.approx(
        [float(wanted[place, token]) for place, token in enumerate(tokens[1:])], abs=1e-4
    )
    assert text.startswith(PROMPT)
    assert [token for each in scores for token in each.tokens] == [
        text[start:end] for start, end in zip(offsets, [*offsets[1:], len(text)], strict=True)
    ]


def test_a_prompt_has_its_probabilities_wherever_it_is_read_and_whatever_is_cached(
    shallow_idle: ProcessCluster,
) -> None:
    with shallow_idle.client() as client:
        for _ in range(2):
            answer = client.generate(PROMPT * 8, max_tokens=1, prompt_logprobs=3)
            tokens = client.tokenize(PROMPT * 8).token_ids
            assert [each.chosen.token_id for each in answer.prompt_logprobs] == list(tokens[1:])
            assert answer.usage.cached_tokens == 0


def test_the_sdk_reads_them_whole_and_streamed_for_every_answer(
    shallow_idle: ProcessCluster,
) -> None:
    with shallow_idle.sdk() as sdk:
        options = {"model": MODEL, "n": 2, "seed": 3, "max_tokens": 6, "logprobs": True}
        messages = [{"role": "user", "content": "Name a colour."}]
        whole = sdk.chat.completions.create(messages=messages, top_logprobs=2, **options)  # type: ignore[call-overload]
        streamed: list[list[float]] = [[], []]
        for chunk in sdk.chat.completions.create(  # type: ignore[call-overload]
            messages=messages, top_logprobs=2, stream=True, **options
        ):
            for choice in chunk.choices:
                content = choice.logprobs.content if choice.logprobs else []
                streamed[choice.index] += [each.logprob for each in content]
        for choice in whole.choices:
            told = [each.logprob for each in choice.logprobs.content]
            # The second prompt is cached, which shows in the last bits.
            assert told == pytest.approx(streamed[choice.index], abs=1e-4)
            assert {len(each.top_logprobs) for each in choice.logprobs.content} == {2}
        legacy = sdk.completions.create(
            model=MODEL, prompt=PROMPT, logprobs=3, max_tokens=4, temperature=0
        )
        listed = legacy.choices[0].logprobs
        assert listed is not None
        assert "".join(listed.tokens or []) == legacy.choices[0].text
        assert [len(each) in (3, 4) for each in listed.top_logprobs or []] == [True] * 4
