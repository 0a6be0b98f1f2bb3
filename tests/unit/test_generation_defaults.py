"""generation_config.json: what it makes of requests that leave something out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from http_bodies import HELLO
from transformers import GenerationConfig

from baton.core.errors import BatonError, InvalidConfig, UnsupportedModel
from baton.core.generation_defaults import NO_DEFAULTS, GenerationDefaults, read_defaults
from baton.core.types import Request, Sampling
from baton.request_builder import GenerateOptions, generate_request
from baton.router.edges.grpc.protobuf import parse_request
from baton.router.edges.http.chat_request import ChatRequest
from baton.router.edges.http.completion_request import CompletionRequest

QWEN: dict[str, object] = {
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "eos_token_id": [151645, 151643],
    "transformers_version": "4.37.0",
}


def read(folder: Path, mode: str = "auto", **stated: object) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(stated))
    return read_defaults(folder, mode)


def over_grpc(defaults: GenerationDefaults, options: GenerateOptions) -> Request:
    return parse_request(generate_request("x", {"seed": 1, **options}), defaults)


def over_http(defaults: GenerationDefaults, **fields: object) -> Request:
    body = ChatRequest.parse({**HELLO, "seed": 1, **fields})
    (request,) = body.requests("id", defaults)
    return request


def test_what_a_request_leaves_out_is_the_models(tmp_path: Path) -> None:
    defaults = read(tmp_path, **QWEN)
    wanted = Sampling(0.7, 20, 0.8, repetition_penalty=1.05, seed=1)
    assert over_grpc(defaults, {}).sampling == wanted
    assert over_http(defaults).sampling == wanted
    assert str(defaults) == "temperature 0.7, top_k 20, top_p 0.8, repetition_penalty 1.05"


def test_without_defaults_the_edges_have_their_own(tmp_path: Path) -> None:
    for defaults in (read_defaults(tmp_path), read(tmp_path, "none", **QWEN), NO_DEFAULTS):
        assert over_grpc(defaults, {}).sampling == Sampling(seed=1)
        assert over_http(defaults).sampling == Sampling(1.0, seed=1)
        assert str(defaults) == ""


# A value of the model, a request's own that means nothing, and what is then in use.
OVERRIDES: dict[str, tuple[object, Any, object]] = {
    "temperature": (0.7, 0.0, 0.0),
    "top_k": (20, 0, 0),
    "top_p": (0.8, 1.0, 1.0),
    "min_p": (0.1, 0.0, 0.0),
    "repetition_penalty": (1.2, 1.0, 1.0),
    "no_repeat_ngram_size": (3, 0, 0),
    "suppress_tokens": ([3], [], ()),
    "begin_suppress_tokens": ([3, 4], [], ()),
    "bad_words_ids": ([[3, 4]], [], ()),
    "min_tokens": (3, 0, 0),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_a_requests_own_value_comes_first_even_if_it_asks_for_nothing(
    name: str, tmp_path: Path
) -> None:
    stated, own, used = OVERRIDES[name]
    key = "min_new_tokens" if name == "min_tokens" else name
    defaults = read(tmp_path, do_sample=True, **{key: stated})
    options: Any = {name: own}
    for left_out, given in (
        (over_grpc(defaults, {}), over_grpc(defaults, options)),
        (over_http(defaults), over_http(defaults, **options)),
    ):
        assert getattr(left_out.sampling, name) not in (own, used)
        assert getattr(given.sampling, name) == used
    assert getattr(over_http(defaults, **{name: None}).sampling, name) != used


def test_greedy_is_greedy_over_both_edges(tmp_path: Path) -> None:
    defaults = read(tmp_path, do_sample=False, temperature=0.6, top_p=0.5, top_k=3)
    assert over_grpc(defaults, {}).sampling == over_http(defaults).sampling == Sampling(seed=1)
    assert str(defaults) == "temperature 0"
    # What transformers would not use does not come back with a temperature.
    assert over_http(defaults, temperature=0.9).sampling == Sampling(0.9, seed=1)


def test_sampling_without_a_temperature_has_transformers_own(tmp_path: Path) -> None:
    defaults = read(tmp_path, do_sample=True, top_p=0.9)
    assert over_grpc(defaults, {}).sampling == Sampling(1.0, top_p=0.9, seed=1)


def test_values_without_do_sample_are_used(tmp_path: Path) -> None:
    defaults = read(tmp_path, temperature=0.6, top_p=0.9)
    assert over_grpc(defaults, {}).sampling == Sampling(0.6, top_p=0.9, seed=1)


def test_a_least_length_counts_the_prompt_unless_a_request_says_more(tmp_path: Path) -> None:
    defaults = read(tmp_path, min_length=40)
    assert over_grpc(defaults, {}).sampling.min_length == 40
    assert over_grpc(defaults, {"min_tokens": 0}).sampling.min_length == 0
    both = read(tmp_path, min_length=40, min_new_tokens=5)
    sampling = over_http(both).sampling
    assert (sampling.min_tokens, sampling.min_length) == (5, 0)


def test_the_most_tokens_are_the_models_where_a_request_says_none(tmp_path: Path) -> None:
    defaults = read(tmp_path, max_new_tokens=77)
    assert over_grpc(defaults, {}).max_tokens == 77
    assert over_grpc(defaults, {"max_tokens": 5}).max_tokens == 5
    assert over_http(defaults, max_tokens=5).max_tokens == 5
    (completion,) = CompletionRequest.parse({"prompt": "x"}).requests("id", defaults)
    assert completion.max_tokens == 77
    assert str(defaults) == "max_tokens 77"


def test_an_older_folder_has_its_defaults_in_its_config(tmp_path: Path) -> None:
    config = {"model_type": "llama", "repetition_penalty": 1.3, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert str(read_defaults(tmp_path)) == "repetition_penalty 1.3"
    assert str(read(tmp_path, eos_token_id=2)) == ""


def test_what_transformers_writes_without_being_told_changes_nothing(tmp_path: Path) -> None:
    GenerationConfig().save_pretrained(tmp_path)
    assert read_defaults(tmp_path) == NO_DEFAULTS
    everything = GenerationConfig._get_default_generation_params()
    defaults = read(tmp_path, **{**everything, "do_sample": None})
    assert over_http(defaults).sampling == Sampling(1.0, 50, seed=1)


def test_long_lists_are_counted_in_the_line(tmp_path: Path) -> None:
    assert str(read(tmp_path, suppress_tokens=list(range(90)))) == "suppress_tokens (90)"


UNSUPPORTED: dict[str, object] = {
    "num_beams": 4,
    "num_return_sequences": 2,
    "typical_p": 0.9,
    "epsilon_cutoff": 3e-4,
    "eta_cutoff": 3e-4,
    "top_h": 0.4,
    "penalty_alpha": 0.6,
    "guidance_scale": 1.5,
    "sequence_bias": [[[3], -2.0]],
    "encoder_repetition_penalty": 1.2,
    "encoder_no_repeat_ngram_size": 2,
    "forced_bos_token_id": 3,
    "forced_eos_token_id": 3,
    "exponential_decay_length_penalty": [3, 1.1],
    "watermarking_config": {"bias": 2.5},
    "token_healing": True,
    "stop_strings": ["END"],
    "max_time": 2.0,
}


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name(key: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{key} .* none serves the model"):
        read(tmp_path, **{key: UNSUPPORTED[key]})
    assert read(tmp_path, "none", **{key: UNSUPPORTED[key]}) == NO_DEFAULTS


WRONG: list[tuple[str, object]] = [
    ("temperature", "0.7"),
    ("temperature", 3.0),
    ("temperature", True),
    ("top_k", 2.5),
    ("top_k", -1),
    ("top_p", 1.5),
    ("repetition_penalty", 0),
    ("do_sample", 1),
    ("no_repeat_ngram_size", 65),
    ("suppress_tokens", 5),
    ("suppress_tokens", [-1]),
    ("begin_suppress_tokens", ["a"]),
    ("bad_words_ids", [3]),
    ("bad_words_ids", [[]]),
    ("suppress_tokens", list(range(16_385))),
    ("min_new_tokens", -3),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_a_wrong_value_is_refused_with_file_and_key(
    key: str, value: object, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match=r"^generation_config\.json: ") as refused:
        read(tmp_path, **{key: value})
    assert refused.value.field == key
    assert key in refused.value.message or value == [[]]


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_file_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(BatonError, match=r"generation_config\.json"):
        read_defaults(tmp_path)
