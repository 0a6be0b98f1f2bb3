"""Models that run through transformers: their tokens, and what is refused."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import pytest
import torch
from engine_loop import KV_MEMORY, answer, sequence, serve
from foreign_models import FOREIGN_MODELS, REFUSED_MODELS
from tiny_models import (
    TINY_MODELS,
    VOCABULARY,
    TinyModel,
    change_config,
    choices_of_transformers,
    generate_with_transformers,
    save,
)
from transformers import AutoConfig, BertForMaskedLM, T5ForConditionalGeneration

from baton.cluster.preflight import engine_note
from baton.core.config import parse
from baton.core.errors import (
    BatonError,
    InvalidCheckpoint,
    InvalidConfig,
    ModelNotFound,
    UnsupportedModel,
)
from baton.core.types import AttemptKey, Sampling, Work
from baton.engine.engine import Engine
from baton.engine.model_choice import FallbackArchitecture, read_model, uses_fallback
from baton.engine.sequence import Sequence

ANSWER = 14
"""Passes the end of a page of 16 tokens after a prompt of 5."""


def random_prompt(length: int) -> list[int]:
    source = random.Random(length)
    return [source.randrange(VOCABULARY) for _ in range(length)]


PROMPTS = [random_prompt(length) for length in (1, 5, 23, 40)]


def load(folder: Path, page_size: int = 16, dtype: str = "float32") -> Engine:
    return Engine.load(
        folder, page_size=page_size, kv_memory=KV_MEMORY, dtype=dtype, engine="transformers"
    )


@pytest.mark.parametrize("name", FOREIGN_MODELS)
def test_a_mixed_batch_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    oracle = save(FOREIGN_MODELS[name], tmp_path)
    expected: list[list[int]] = []
    for page_size, chunk in ((1, 7), (16, 200)):
        engine = load(tmp_path, page_size)
        answers = serve(engine, PROMPTS, ANSWER, chunk)
        expected = expected or choices_of_transformers(oracle, PROMPTS, answers)
        assert answers == expected, (page_size, chunk)
        assert engine.pool.free == engine.pool.total
    assert len({token for tokens in expected for token in tokens}) > 15


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen3-windows", "smollm3-windows", "gemma2", "gemma3", "granite", "olmo2"),
        *("phi3-partial", "phi3-long", "ministral", "mixtral", "qwen2-moe", "qwen3-moe", "dots1"),
        *("gpt-oss", "deepseek-v3"),
    ],
)
def test_a_native_family_answers_the_same_through_transformers(name: str, tmp_path: Path) -> None:
    save(TINY_MODELS[name], tmp_path)
    native = Engine.load(tmp_path, kv_memory=KV_MEMORY)
    foreign = load(tmp_path)
    assert serve(foreign, PROMPTS, ANSWER, 9) == serve(native, PROMPTS, ANSWER, 9)
    assert native.fingerprint != foreign.fingerprint  # their pages hold keys in another order


def test_a_long_chunk_is_attended_in_parts(tmp_path: Path) -> None:
    model = TINY_MODELS["gemma2"].changed(max_position_embeddings=1024)
    oracle, prompt = save(model, tmp_path), random_prompt(700)
    expected = generate_with_transformers(oracle, prompt, ANSWER)
    for chunk in (700, 300):
        assert serve(load(tmp_path), [prompt], ANSWER, chunk) == [expected], chunk


def test_pages_of_another_engine_continue_the_answer(tmp_path: Path) -> None:
    oracle = save(FOREIGN_MODELS["cohere2"], tmp_path)
    prefill, decode = load(tmp_path, 4), load(tmp_path, 4)
    prompt = random_prompt(37)
    there, here = sequence(prefill, prompt, ANSWER), sequence(decode, prompt, ANSWER)
    here.lease.pages.reverse()
    token = prefill.step({there: len(prompt)})[0]
    assert isinstance(token, int)
    decode.kv[here.lease.held] = prefill.kv[there.lease.held]
    here.computed = len(prompt)
    here.append(token)
    while here.generated < ANSWER:
        following = decode.step({here: 1})[0]
        assert isinstance(following, int)
        here.append(following)
    assert here.tokens[len(prompt) :] == generate_with_transformers(oracle, prompt, ANSWER)


def test_prompt_tokens_are_scored_from_the_model_s_own_logits(tmp_path: Path) -> None:
    oracle, prompt = save(TINY_MODELS["gemma2"], tmp_path), random_prompt(30)
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt])).logits[0]
    expected = logits.log_softmax(dim=1)
    engine = load(tmp_path)
    work = Work(AttemptKey("test", 0), prompt, Sampling(), 1, frozenset(), prompt_logprobs=0)
    scored = Sequence(work, engine.pool.acquire(4))
    scored.lease.cover(4)
    engine.step({scored: 11})
    engine.step({scored: 19})
    found = [each.logprob for each in scored.prompt_scores]
    assert found == pytest.approx(
        [float(expected[row, prompt[row + 1]]) for row in range(29)], abs=1e-4
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close_to_float32(dtype: str, tmp_path: Path) -> None:
    oracle, prompt = save(FOREIGN_MODELS["starcoder2"], tmp_path), random_prompt(40)
    tokens = answer(load(tmp_path, dtype=dtype), prompt, ANSWER)
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    assert ((logits.amax(dim=1) - chosen) / logits.std(dim=1)).max() < 0.15


def test_native_families_run_natively_unless_asked_otherwise(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path / "llama")
    save(FOREIGN_MODELS["gpt2"], tmp_path / "gpt2")
    assert not uses_fallback(tmp_path / "llama")
    assert uses_fallback(tmp_path / "llama", "transformers")
    assert uses_fallback(tmp_path / "gpt2")
    with pytest.raises(UnsupportedModel, match="'gpt2' is not supported; supported: llama"):
        read_model(tmp_path / "gpt2", "native")


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({"hidden_act": "relu"}, "activation 'relu' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial rotary embeddings are not supported"),
    ],
)
def test_a_native_family_with_a_setting_of_transformers_alone_runs_through_it(
    changes: dict[str, object], obstacle: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    oracle = save(TINY_MODELS["llama"].changed(**changes), tmp_path)
    note = engine_note(parse({"model": str(tmp_path)}))
    assert note.startswith(f"llama runs through transformers ({obstacle}")
    with pytest.raises(UnsupportedModel, match=obstacle):
        read_model(tmp_path, "native")
    engine = Engine.load(tmp_path, kv_memory=KV_MEMORY)
    assert note in caplog.messages
    found = serve(engine, PROMPTS, ANSWER, 9)
    assert found == choices_of_transformers(oracle, PROMPTS, found)


def test_what_neither_engine_runs_is_refused_as_the_native_one_refuses_it(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    for changes, message in (
        ({"is_causal": False}, "is_causal false is not supported"),
        ({"is_causal": None, "is_encoder_decoder": True}, "is_encoder_decoder true is not"),
    ):
        change_config(tmp_path, **changes)
        with pytest.raises(UnsupportedModel, match=message):
            read_model(tmp_path)
    change_config(tmp_path, is_encoder_decoder=None, layer_types=["full_attention"])
    with pytest.raises(UnsupportedModel, match=r"config\.json: .*layer_types"):
        read_model(tmp_path, "transformers")


def test_the_start_says_what_the_fallback_costs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(FOREIGN_MODELS["gpt2"], tmp_path)
    with caplog.at_level(logging.WARNING):
        Engine.load(tmp_path, kv_memory=KV_MEMORY)
    (line,) = [each for each in caplog.messages if "transformers" in each]
    assert line.startswith("gpt2 runs through transformers, over our pages: without compiled")


def test_the_shape_is_found_without_weights(tmp_path: Path) -> None:
    save(FOREIGN_MODELS["minicpm3-short-values"], tmp_path)
    (tmp_path / "model.safetensors").unlink()
    shape = read_model(tmp_path, "transformers")
    assert isinstance(shape, FallbackArchitecture)
    assert (shape.layers, shape.kv_heads, shape.head_dim) == (3, 4, 24)
    assert (shape.context_length, shape.windows) == (256, (None,) * 3)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"layer_types": ["sliding_attention"] * 3}, "transformers makes no cache for"),
        ("phi3", {"layer_types": 7}, r"config\.json: transformers cannot read it: 'int' object"),
        (
            "gpt2",
            {"rope_parameters": {"rope_type": "yarn"}},
            r"config\.json: transformers cannot read it: .*Missing required keys in `rope_param",
        ),
    ],
)
def test_a_config_that_transformers_cannot_read_is_refused_in_one_line(
    family: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    save(TinyModel(family), tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=rf"^[^\n]*{message}[^\n]*$"):
        read_model(tmp_path, "transformers")


@pytest.mark.parametrize("name", REFUSED_MODELS)
def test_what_cannot_be_served_is_refused_by_name(name: str, tmp_path: Path) -> None:
    model, message = REFUSED_MODELS[name]
    save(model, tmp_path)
    with pytest.raises(UnsupportedModel, match=message):
        read_model(tmp_path)


@pytest.mark.parametrize("model", [BertForMaskedLM, T5ForConditionalGeneration])
def test_encoders_are_refused_by_name(model: type, tmp_path: Path) -> None:
    config = AutoConfig.for_model(model.config_class.model_type)  # type: ignore[attr-defined]
    config.architectures = [model.__name__]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"{model.__name__} is not a decoder"):
        read_model(tmp_path)


def test_an_encoder_that_calls_itself_a_decoder_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("bert", is_decoder=False)
    config.architectures = ["BertLMHeadModel"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="BertLMHeadModel cannot be served"):
        read_model(tmp_path)


def test_code_that_ships_with_a_model_is_not_run(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    values = {"model_type": "evil", "auto_map": auto_map, "architectures": ["Model"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UnsupportedModel, match="code that ships with a model is never run"):
        read_model(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "model",
    [
        TinyModel("glm4_moe_lite", {**FOREIGN_MODELS["minicpm3-short-values"].settings}).changed(
            num_key_value_heads=2, first_k_dense_replace=4
        ),
    ],
    ids=lambda model: model.family,
)
def test_a_config_that_transformers_itself_cannot_run_is_refused(
    model: TinyModel, tmp_path: Path
) -> None:
    save(model, tmp_path)
    with pytest.raises(UnsupportedModel, match=r"^transformers cannot run \w+ with this config: "):
        load(tmp_path)


def broken(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("change", ["lacks a tensor", "has another tensor", "has another shape"])
def test_a_checkpoint_that_does_not_fit_is_refused(change: str, tmp_path: Path) -> None:
    model = save(FOREIGN_MODELS["olmo"], tmp_path)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "lacks a tensor":
        del tensors[name]
    elif change == "has another tensor":
        tensors["model.layers.1.mlp.other.weight"] = tensors[name].clone()
    else:
        tensors[name] = tensors[name][:-1].clone()
    broken(tmp_path, tensors)
    with pytest.raises(InvalidCheckpoint, match=r"layers\.1\.mlp"):
        load(tmp_path)


@pytest.mark.parametrize("size", [0, 5, 1000])
def test_a_file_that_is_cut_off_is_refused(size: int, tmp_path: Path) -> None:
    save(FOREIGN_MODELS["gpt2"], tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(InvalidCheckpoint, match=r"^transformers cannot load GPT2"):
        load(tmp_path)


def test_sizes_that_no_memory_holds_are_refused(tmp_path: Path) -> None:
    save(FOREIGN_MODELS["olmo"], tmp_path)
    change_config(tmp_path, vocab_size=10**14)
    with pytest.raises(InvalidCheckpoint, match=r"^transformers cannot load \w+: "):
        load(tmp_path)


def test_only_safetensors_are_read(tmp_path: Path) -> None:
    model = save(FOREIGN_MODELS["gpt2"], tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match="safetensors only"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModel),
        ({"is_causal": False}, UnsupportedModel),
        ({"use_bidirectional_attention": True}, UnsupportedModel),
    ],
)
def test_configs_that_ask_for_more_are_refused(
    changes: dict[str, object], error: type[BatonError], tmp_path: Path
) -> None:
    save(TinyModel("gemma2", {"head_dim": 16}), tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(error):
        load(tmp_path)


def test_gguf_files_run_natively_alone(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    (tmp_path / "model.gguf").touch()
    assert uses_fallback(tmp_path, "transformers")
    read_model(tmp_path, "transformers")  # of the safetensors beside it
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="a GGUF file runs natively"):
        read_model(tmp_path, "transformers")


def test_ranks_cannot_share_it(tmp_path: Path) -> None:
    from baton.worker.rank_process import check_ranks

    save(FOREIGN_MODELS["gpt2"], tmp_path)
    with pytest.raises(InvalidConfig, match="2 ranks cannot share"):
        check_ranks(2, read_model(tmp_path))


def test_a_model_that_does_not_answer_over_pages_as_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check at start is the last line of defence: here attention forgets the past."""
    from baton.engine.fallback import attention_interface

    save(FOREIGN_MODELS["olmo"], tmp_path)
    honest = attention_interface.visibility
    monkeypatch.setattr(
        attention_interface, "visibility", lambda q, k, window, kind: honest(q, k, 3, kind)
    )
    with pytest.raises(UnsupportedModel, match="does not answer over pages"):
        load(tmp_path)
