"""Clusters whose model is a GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType
from gguf_files import SHAPE, byte_level, load_with_transformers, write_gguf
from processes import ProcessCluster
from text_model import END, tokenizer
from tiny_models import TinyModel, build, generate_with_transformers

from baton.core.config import Config
from baton.core.model_store import model_name

PROMPT = [5, 17, 60, 3, 9]
ANSWER = 12


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
