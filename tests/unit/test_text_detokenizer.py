"""Streamed text against tokenizers' decoding of all tokens at once."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from baton.core import model_store
from baton.core.errors import UnsupportedModel
from baton.router.answers.detokenizer import Detokenizer, detokenizer_factory, special_ids

TEXTS = [
    "",
    "Hello, world!  Two  spaces\n\n\ttab",
    "naïve café, Zürich, Москва, 你好世界, こんにちは, 안녕하세요, مرحبا",
    "👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 e\u0301 \u200d",
    "\ufffd is a character \ufffd\ufffd too",
    "def f(x):\n    return x ** 2  # 12345\n",
    "  leading and trailing  ",
]


def embedded() -> Tokenizer:
    return Tokenizer.from_file(str(model_store.locate("embedded") / "tokenizer.json"))


def sentencepiece_like(decoder: decoders.Decoder) -> Tokenizer:
    """A small Llama-2-like vocabulary: bytes as a fallback, and words with their space."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [
        "▁",
        "▁▁",
        "a",
        "b",
        "▁a",
        "▁ab",
        "ab",
        "é",
        "界",
        "\ufffd",
        "▁\ufffd",
        "\n",
        ".",
        "",
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoder
    made.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    made.add_tokens(["<tool> x"])
    return made


def llama_2() -> Tokenizer:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return sentencepiece_like(decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)]))


def gemma() -> Tokenizer:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return sentencepiece_like(decoders.Sequence(steps))


def metaspace() -> Tokenizer:
    return sentencepiece_like(decoders.Metaspace())


def words() -> Tokenizer:
    """Without a decoder: tokens are joined with spaces."""
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


ALL = [embedded, llama_2, gemma, metaspace, words]


def factory_of(tokenizer: Tokenizer) -> Callable[[], Detokenizer]:
    return detokenizer_factory(tokenizer, special_ids(tokenizer))


def stream(detokenizer: Detokenizer, pieces: list[list[int]]) -> list[str]:
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.flush()]


def split(ids: list[int], chooser: random.Random) -> list[list[int]]:
    """Mostly single tokens, as they come from a decode worker."""
    pieces = []
    start = 0
    while start < len(ids):
        size = chooser.choice([0, 1, 1, 1, 1, 2, 5])
        pieces.append(ids[start : start + size])
        start += size
    return pieces


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_random_tokens_stream_to_what_they_decode_to(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    factory = factory_of(tokenizer)
    chooser = random.Random(0)
    size = tokenizer.get_vocab_size()
    for _ in range(1500):
        # Ids just past the end are unknown; low ones are special and byte tokens.
        top = chooser.choice([20, 270, size, size + 3])
        low = chooser.choice([0, min(top, size) - 12])
        ids = [chooser.randrange(max(low, 0), top) for _ in range(chooser.randrange(20))]
        assert "".join(stream(factory(), split(ids, chooser))) == tokenizer.decode(ids), ids


@pytest.mark.parametrize("make", [llama_2, gemma], ids=lambda make: make.__name__)
def test_texts_written_in_byte_tokens_stream_whole(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    factory = factory_of(tokenizer)
    chooser = random.Random(1)
    for text in TEXTS:
        ids = tokenizer.encode(text.replace(" ", "▁"), add_special_tokens=False).ids
        assert "".join(stream(factory(), split(ids, chooser))) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_the_embedded_model_streams_texts_whole(text: str) -> None:
    tokenizer = embedded()
    ids = tokenizer.encode(text).ids
    pieces = stream(factory_of(tokenizer)(), [[token] for token in ids])
    assert "".join(pieces) == text


def test_random_bytes_become_the_same_replacement_characters() -> None:
    made = Tokenizer(
        models.BPE(
            vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
            merges=[],
        )
    )
    made.decoder = decoders.ByteLevel()
    factory = factory_of(made)
    chooser = random.Random(2)
    for _ in range(5000):
        ids = [chooser.randrange(256) for _ in range(chooser.randrange(12))]
        assert "".join(stream(factory(), split(ids, chooser))) == made.decode(ids)


def test_a_character_is_never_handed_out_in_part() -> None:
    tokenizer = embedded()
    text = "日本語😀한국어👨‍👩‍👧ß"
    ids = tokenizer.encode(text).ids
    assert len(ids) > len(text)
    pieces = stream(factory_of(tokenizer)(), [[token] for token in ids])
    assert not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_at_the_end_is_replaced() -> None:
    tokenizer = embedded()
    ids = tokenizer.encode("ok 😀").ids[:-1]
    pieces = stream(factory_of(tokenizer)(), [[token] for token in ids])
    assert pieces[-1] == "\ufffd"
    assert "".join(pieces) == tokenizer.decode(ids)


def test_text_comes_out_with_the_token_that_completes_it() -> None:
    tokenizer = llama_2()
    ids = [tokenizer.token_to_id(t) for t in ("▁ab", "▁a", "b", "<0xE7>", "<0x95>", "<0x8C>", ".")]
    pieces = stream(factory_of(tokenizer)(), [[token] for token in ids])
    assert pieces == ["ab", " a", "b", "", "", "", "界.", ""]


def test_special_tokens_leave_no_text() -> None:
    tokenizer = embedded()
    ids = [1, *tokenizer.encode("Hi").ids, 2]
    assert "".join(stream(factory_of(tokenizer)(), [ids])) == "Hi"


@pytest.mark.parametrize("make", [embedded, llama_2], ids=lambda make: make.__name__)
def test_a_long_answer_streams_whole(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    chooser = random.Random(3)
    ids = [chooser.randrange(tokenizer.get_vocab_size()) for _ in range(20_000)]
    pieces = stream(factory_of(tokenizer)(), [[token] for token in ids])
    assert "".join(pieces) == tokenizer.decode(ids)


def test_an_unknown_mixture_of_decoders_is_refused() -> None:
    tokenizer = sentencepiece_like(decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]))
    with pytest.raises(UnsupportedModel, match="ByteLevel, Fuse"):
        factory_of(tokenizer)
