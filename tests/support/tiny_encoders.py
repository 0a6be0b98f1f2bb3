"""Small encoders with random weights, saved as sentence-transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel

WORDS = ["<pad>", "<unk>", "[CLS]", "[SEP]", *(f"w{number}" for number in range(95))]
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": len(WORDS),
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}


def save_encoder(folder: Path, kind: str = "bert", **pooling: bool) -> Any:
    """Returns the model in transformers; `pooling` are sentence-transformers' modes."""
    torch.manual_seed(3)
    model = AutoModel.from_config(AutoConfig.for_model(kind, **SMALL), add_pooling_layer=False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    if pooling:
        (folder / "1_Pooling").mkdir()
        modes = {f"pooling_mode_{name}": value for name, value in pooling.items()}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    return model.eval()
