"""Ways to embed texts in this process, for bench/embeddings.py."""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from baton.core.types import AttemptKey, Pooling, Sampling, Work
from baton.engine import quality
from baton.engine.encoder import Encoder
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence as EngineSequence

Embed = Callable[[Sequence[str]], numpy.ndarray]

BATCH = 32
"""Texts per batch: sentence-transformers' default."""
MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": 30522,
}
EMBEDDED = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def _words() -> list[str]:
    return Path(quality.__file__).with_suffix(".txt").read_text().split()


def draw_texts(count: int) -> list[str]:
    words, draw = _words(), random.Random(1)
    return [" ".join(draw.choices(words, k=draw.randint(3, 60))) for _ in range(count)]


def save_random_encoder(folder: Path) -> None:
    """Saves an encoder in the shape of all-MiniLM-L6-v2."""
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.for_model("bert", **MINILM)).save_pretrained(folder)
    _save_tokenizer(folder)


def save_random_model(folder: Path) -> None:
    """Saves a model in the shape of the embedded model."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **EMBEDDED)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    _save_tokenizer(folder)


def _save_tokenizer(folder: Path) -> None:
    """Saves a tokenizer whose tokens are whole words."""
    words = ["[UNK]", "[CLS]", "[SEP]", *dict.fromkeys(_words())]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    made.save(str(folder / "tokenizer.json"))


def _tokenizer(folder: Path) -> Callable[[str], list[int]]:
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.no_truncation()
    made.no_padding()
    return lambda text: made.encode(text).ids


def _chunk_tokens(device: torch.device) -> int:
    """The default tokens of a step."""
    return 512 if device.type == "cpu" else 8192


def _chunks(inputs: Sequence[list[int]], most_tokens: int) -> Iterator[list[list[int]]]:
    """Groups the inputs, in order, into steps."""
    chunk: list[list[int]] = []
    for tokens in inputs:
        if chunk and sum(map(len, chunk)) + len(tokens) > most_tokens:
            yield chunk
            chunk = []
        chunk.append(tokens)
    yield chunk


def _normalized(vectors: torch.Tensor) -> numpy.ndarray:
    return torch.nn.functional.normalize(vectors.float().cpu()).numpy()


def encoder_by_engine(folder: Path, device: torch.device) -> Embed:
    tokenize, encoder = _tokenizer(folder), Encoder(folder, device)

    def embed(texts: Sequence[str]) -> numpy.ndarray:
        inputs = [*map(tokenize, texts)]
        chunks = _chunks(inputs, _chunk_tokens(device))
        return _normalized(torch.cat([encoder.embed(chunk) for chunk in chunks]))

    return embed


def encoder_by_others(folder: Path, device: torch.device) -> tuple[str, Embed]:
    """sentence-transformers if it is installed, else transformers; and its name."""
    if importlib.util.find_spec("sentence_transformers"):
        library: Any = importlib.import_module("sentence_transformers")
        found = library.SentenceTransformer(str(folder), device=str(device))
        # A folder of random weights does not say that vectors are normalized.
        return "sentence-transformers", partial(found.encode, normalize_embeddings=True)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval().to(device)

    def mean(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    return "transformers, batches of 32 by length", _in_batches(model, folder, device, mean)


def last_token_by_engine(folder: Path, device: torch.device) -> Embed:
    """Embeds with the engine under the simplest scheduler."""
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    engine = Engine.load(folder, device=str(device), dtype=dtype, kv_memory=1 << 30)
    tokenize, pool = _tokenizer(folder), engine.pool

    def step(inputs: list[list[int]]) -> torch.Tensor:
        sequences = []
        for number, tokens in enumerate(inputs):
            key, pages = AttemptKey(str(number), 1), pool.pages_for(len(tokens) + 1)
            work = Work(key, tokens, Sampling(), 1, frozenset(), pooling=Pooling.LAST)
            sequences.append(EngineSequence(work, pool.acquire(pages)))
            sequences[-1].lease.cover(pages)
        engine.step({each: each.uncomputed for each in sequences})
        vectors = [each.pooled.embedding for each in sequences if each.pooled]
        for each in sequences:
            each.lease.release()
        return torch.from_numpy(numpy.stack([numpy.frombuffer(each, "<f4") for each in vectors]))

    def embed(texts: Sequence[str]) -> numpy.ndarray:
        inputs = [*map(tokenize, texts)]
        return _normalized(torch.cat([*map(step, _chunks(inputs, _chunk_tokens(device)))]))

    return embed


def last_token_by_transformers(folder: Path, device: torch.device) -> Embed:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = AutoModel.from_pretrained(folder, dtype=dtype).eval().to(device)

    def last(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return states[torch.arange(len(states), device=device), mask.sum(1) - 1]

    return _in_batches(model, folder, device, last)


def _in_batches(
    model: Any,
    folder: Path,
    device: torch.device,
    pool: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Embed:
    """Embeds as sentence-transformers does: sorted by length, padded to a batch's longest text."""
    tokenize = _tokenizer(folder)

    @torch.inference_mode()
    def embed_batch(inputs: Sequence[list[int]]) -> torch.Tensor:
        rows = [torch.tensor(tokens) for tokens in inputs]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(tokens) for tokens in inputs])
        mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long().to(device)
        states = model(padded.to(device), attention_mask=mask).last_hidden_state
        return pool(states, mask).float()

    def embed(texts: Sequence[str]) -> numpy.ndarray:
        inputs = [*map(tokenize, texts)]
        order = sorted(range(len(inputs)), key=lambda index: -len(inputs[index]))
        batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
        pooled = torch.cat([embed_batch([inputs[each] for each in batch]) for batch in batches])
        vectors = torch.empty_like(pooled)
        vectors[order] = pooled
        return _normalized(vectors)

    return embed
