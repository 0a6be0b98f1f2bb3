"""Encoders against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_encoders import save_encoder

from baton.core.encoder_config import EncoderConfig
from baton.core.errors import UnsupportedModel
from baton.engine.encoder import Encoder

INPUTS = [[2, 5, 9, 3], [2, 3], [2, 7, 8, 3], [2, *range(10, 40), 3], [2]]


@pytest.mark.parametrize("padding", [1, 32])
@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta"])
@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token"])
def test_vectors_are_those_of_transformers(
    tmp_path: Path, device: torch.device, kind: str, pooling: str, padding: int
) -> None:
    oracle = save_encoder(tmp_path, kind, **{pooling: True, "max_tokens": False})
    encoder = Encoder(tmp_path, device)
    encoder._padding = padding
    found = encoder.embed(INPUTS)
    for vector, tokens in zip(found, INPUTS, strict=True):
        with torch.no_grad():
            hidden = oracle(torch.tensor([tokens])).last_hidden_state[0]
        expected = hidden.mean(0) if pooling == "mean_tokens" else hidden[0]
        assert (vector - expected).abs().max() < 1e-5


def test_an_input_has_as_many_tokens_as_its_folder_says(tmp_path: Path) -> None:
    save_encoder(tmp_path, "roberta")
    assert EncoderConfig.read(tmp_path).max_tokens == 62  # positions begin at 2
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    assert EncoderConfig.read(tmp_path).max_tokens == 16


def test_what_is_no_such_encoder_is_refused(tmp_path: Path) -> None:
    def refused(why: str) -> None:
        with pytest.raises(UnsupportedModel, match=why):
            EncoderConfig.read(tmp_path)

    refused("has no config.json")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    refused("of type llama")
    save_encoder(tmp_path, "bert", max_tokens=True)
    refused("pools by max_tokens")
    (tmp_path / "2_Dense").mkdir()
    refused("a dense layer")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_act": "silu"}))
    refused("with silu")
