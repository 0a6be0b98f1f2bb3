"""Guesses on a GPU change no answer: tokens and log probabilities are those without, bit for bit,
while steps run ahead or wait."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pools import CUDA
from random_shapes import VOCABULARY, load_on_gpu
from speculating import SAMPLINGS, Answers, Knowing, Loop, works

from baton.decode_worker.speculation import Speculation
from baton.engine.gpu.device import GpuSettings
from baton.engine.model_choice import KvDtype

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")

CASES: list[tuple[str, KvDtype]] = [
    ("small", "auto"),
    ("mistral", "int8"),
    ("mistral", "int4"),
    ("gemma2", "fp8"),
    ("gemma3", "auto"),
    ("qwen3-moe", "auto"),
    ("deepseek-v3", "auto"),
    ("gpt-oss", "int8"),
]


def differing(found: Answers, wanted: Answers) -> list[tuple[int, str]]:
    """Which answers differ, and in what."""
    return [
        (number, part)
        for number, (one, other) in enumerate(zip(found, wanted, strict=True))
        for part in ("tokens", "logprobs")
        if getattr(one, part) != getattr(other, part)
    ]


@pytest.mark.parametrize(("name", "kv_dtype"), CASES)
def test_any_model_and_sampling_answers_as_without(
    name: str, kv_dtype: KvDtype, tmp_path: Path
) -> None:
    settings = GpuSettings(max_batch=24, chunk_tokens=512, guesses=True)
    engine = load_on_gpu(name, tmp_path, settings, kv_dtype)
    asked = works(SAMPLINGS)
    plain = [Loop(engine).answer([each])[0] for each in asked]
    predicted = [
        replace(each, prediction=answer.tokens) for each, answer in zip(asked, plain, strict=True)
    ]
    guessers = [
        None,
        *(Knowing(plain, wrong, VOCABULARY) for wrong in (0.0, 0.3, 1.0)),
        Speculation(runs_ahead=True),
    ]
    wrong = {}
    for number, guesser in enumerate(guessers):
        loop = Loop(engine, guesser, max_batch=24)
        wrong[number] = differing(loop.answer(asked), plain)
    following = Loop(engine, Speculation(runs_ahead=True), max_batch=24)
    wrong[len(guessers)] = differing(following.answer(predicted), plain)
    assert not any(wrong.values()), wrong
    assert following.accepted
