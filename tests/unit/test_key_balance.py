"""Factors of queries and keys: they change no score, and int8 keys lose less with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapters import load_now, open_pool, save_adapter
from engine_loop import load, serve
from rank_threads import split_engine
from tiny_models import TINY_MODELS, save
from transformers import PreTrainedModel

from baton.core.adapter_store import find_adapter
from baton.core.types import Logprobs
from baton.engine import engine as engines
from baton.engine import key_balance
from baton.engine.engine import Engine
from baton.engine.quality import score

PROMPTS = [[(7 * at * at + at) % 199 for at in range(length)] for length in (3, 20, 70)]
MODELS = ["llama-biases", "qwen2", "qwen3", "olmo2", "phi3-partial", "gemma3", "smollm3"]


def save_uneven(name: str, folder: Path) -> PreTrainedModel:
    """A model some of whose keys' numbers are much larger than the others."""
    model = save(TINY_MODELS[name], folder)
    with torch.no_grad():
        for path, tensor in model.named_parameters():
            if "k_proj" in path or "qkv_proj" in path or "k_norm" in path:
                tensor[3::8] *= 60.0
    model.save_pretrained(folder)
    return model


def load_balanced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """With balanced keys that are stored as they are."""
    with monkeypatch.context() as patch:
        load_model = engines.load_model
        patch.setattr(engines, "load_model", lambda *parts, **_: load_model(*parts, balanced=True))
        return load(folder)


@pytest.mark.parametrize("name", MODELS)
def test_scores_keep_their_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_uneven(name, tmp_path)
    plain, balanced = load(tmp_path), load_balanced(tmp_path, monkeypatch)
    assert score(balanced, PROMPTS[2]) == score(plain, PROMPTS[2])
    assert not torch.equal(balanced.kv, plain.kv)


@pytest.mark.parametrize("name", ["llama-biases", "phi3-partial"])
def test_adapters_add_to_balanced_keys(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    base = save_uneven(name, folder)
    targets = ["qkv_proj"] if name.startswith("phi3") else ["q_proj", "k_proj", "v_proj"]
    save_adapter(base, tmp_path / "adapter", target_modules=targets)
    adapter = find_adapter(str(tmp_path / "adapter"))
    answers = []
    for engine in (load(folder), load_balanced(folder, monkeypatch)):
        load_now(open_pool(engine), adapter)
        answers.append(serve(engine, PROMPTS, 12, chunk=16, adapters=[adapter] * 3))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["qwen2", "olmo2"])
def test_ranks_have_the_factors_of_their_heads(name: str, tmp_path: Path) -> None:
    save_uneven(name, tmp_path / "model")
    whole = load(tmp_path / "model", kv_dtype="int8")
    answers = serve(whole, PROMPTS, 12, chunk=16)
    with split_engine(tmp_path / "model", 2, tmp_path, kv_dtype="int8") as split:
        assert serve(split.engine, PROMPTS, 12, chunk=16) == answers


def error(found: list[Logprobs], wanted: list[Logprobs]) -> float:
    pairs = zip(found, wanted, strict=True)
    return sum(abs(one.logprob - other.logprob) for one, other in pairs) / len(wanted)


@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
def test_uneven_keys_lose_less(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_uneven(name, tmp_path)
    wanted = score(load(tmp_path), PROMPTS[2])
    balanced = error(score(load(tmp_path, kv_dtype="int8"), PROMPTS[2]), wanted)
    monkeypatch.setattr(key_balance, "KEYS", 0.0)
    monkeypatch.setattr(key_balance, "QUERIES", 0.0)
    plain = error(score(load(tmp_path, kv_dtype="int8"), PROMPTS[2]), wanted)
    assert 0 < balanced < plain
