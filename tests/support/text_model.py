"""Tiny models with random weights and a tokenizer of bytes and a few words."""

from __future__ import annotations

import json
from pathlib import Path

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tiny_models import TinyModel, save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"
WORDS = ['{"', '":', '", "', "true", "false", "null", "name", "12", '"}', " the", "</"]

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}<|end|>"
    "{% endfor %}assistant: "
)


def tokenizer() -> Tokenizer:
    """Byte-level; merges spell each of the words from its characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        spelled = word.replace(" ", "Ġ")
        for length in range(2, len(spelled) + 1):
            if spelled[:length] not in vocabulary:
                vocabulary[spelled[:length]] = len(vocabulary)
                merges.append((spelled[: length - 1], spelled[length - 1]))
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True)])
    return made


def save_text_model(folder: Path, seed: int = 0) -> Tokenizer:
    """Writes the model's folder and returns its tokenizer."""
    made = tokenizer()
    end = made.token_to_id(END)
    # More ids than tokens, as real models have.
    shape = {"vocab_size": made.get_vocab_size() + 5, "max_position_embeddings": 1024}
    save(TinyModel("llama", {**shape, "eos_token_id": end}), folder, seed)
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return made


def save_sentencepiece_model(folder: Path, seed: int = 0) -> SentencePieceProcessor:
    """The same with no tokenizer but SentencePiece's own file."""
    lines = ["The quick brown fox jumps over the lazy dog.", "Pack my box with jugs."] * 20
    (folder / "lines.txt").write_text("\n".join(lines))
    SentencePieceTrainer.train(
        input=str(folder / "lines.txt"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        minloglevel=2,
    )
    made = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    shape = {"vocab_size": 325, "max_position_embeddings": 1024, "eos_token_id": made.eos_id()}
    save(TinyModel("llama", shape), folder, seed)
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return made
