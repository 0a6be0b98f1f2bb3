"""Clusters whose model is named by a hub's id or is a GGUF file."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from foreign_models import FOREIGN_MODELS
from gguf import GGMLQuantizationType
from gguf_files import SHAPE, byte_level, load_with_transformers, write_gguf
from processes import ProcessCluster
from serving import Serve
from text_model import END, tokenizer
from tiny_hub import TinyHub
from tiny_models import TinyModel, build, generate_with_transformers, save

from baton.core.config import Config
from baton.core.model_store import model_name

NAME = "org/tiny"
PROMPT = [5, 17, 60, 3, 9]
ANSWER = 12


@pytest.fixture
def hub() -> Iterator[TinyHub]:
    made = TinyHub()
    yield made
    made.close()


@pytest.mark.fleet
def test_a_hubs_foreign_model_is_resolved_and_downloaded_once_and_stays_that_commit(
    hub: TinyHub, tmp_path: Path
) -> None:
    """Also its defaults, and what runs it. tests/cluster/test_scale.py has a native model."""
    model = FOREIGN_MODELS["gpt2"]
    oracle = save(model, tmp_path / "model")
    plain = generate_with_transformers(oracle, PROMPT, ANSWER)
    oracle.generation_config.repetition_penalty = 1.8
    oracle.generation_config.save_pretrained(tmp_path / "model")
    expected = generate_with_transformers(oracle, PROMPT, ANSWER)
    assert expected != plain
    hub.push(NAME, tmp_path / "model")
    flags = ["--model", NAME, "--kv-memory", "4MiB", "--dtype", "float32"]
    environment = hub.environment(tmp_path / "home")
    with Serve(tmp_path / "serve", *flags, environment=environment) as serve:
        serve.ready()
        assert f"Baton serves {NAME}." in serve.stdout
        assert "gpt2 runs through transformers, over our pages" in serve.stdout
        assert "repetition_penalty" in serve.stdout
        assert answer(serve) == expected
        assert hub.requests.count(f"GET /api/models/{NAME}") == 1
        assert set(hub.downloads().values()) == {1}
        save(model, tmp_path / "model", seed=1)
        hub.push(NAME, tmp_path / "model")
        os.kill(serve.worker("decode-0"), signal.SIGKILL)
        serve.wait_for("decode-0 +ready", 2)
        serve.wait_whole()
        assert answer(serve) == expected


def answer(serve: Serve) -> list[int]:
    with serve.client() as client:
        return list(client.generate(PROMPT, max_tokens=ANSWER, timeout=60).token_ids)


def test_what_is_wrong_with_a_hubs_model_is_told_in_one_line_before_anything_starts(
    hub: TinyHub, tmp_path: Path
) -> None:
    environment = hub.environment(tmp_path / "home")
    with Serve(tmp_path / "serve", "--model", "org/none", environment=environment) as serve:
        assert serve.wait() == 1
    assert serve.stdout == ""
    assert re.fullmatch(r"baton: there is no folder 'org/none' here and no such .*\n", serve.stderr)


def test_a_gguf_file_answers_as_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    size = tokenizer().get_vocab_size() + 1
    model = build(TinyModel("llama", {**SHAPE, "vocab_size": size}))
    kind = GGMLQuantizationType.Q4_K
    file = write_gguf(tmp_path / "Tiny-Q4_K.gguf", model, kind, byte_level("qwen2"))
    expected = generate_with_transformers(load_with_transformers(file), PROMPT, ANSWER)
    pool: dict[str, object] = {"kv_memory": "8MiB", "threads": 1}
    tree: dict[str, object] = {"prefill": pool, "decode": pool}
    with ProcessCluster(file, tmp_path / "cluster", tree=tree) as cluster:
        with cluster.client() as client:
            found = client.generate(PROMPT, max_tokens=ANSWER, ignore_eos=True, timeout=60)
            assert list(found.token_ids) == expected
            chat = client.chat([("user", "Hi")], max_tokens=1)
            prompt = tokenizer().encode(f"user: Hi{END}assistant: ").ids
            assert chat.usage.prompt_tokens == len(prompt)
        cluster.wait_idle()
    assert model_name(Config(model=str(file))) == "Tiny-Q4_K"
