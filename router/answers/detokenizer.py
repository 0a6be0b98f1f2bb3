"""Turns tokens into text while they arrive.

The joined texts of a Detokenizer equal the decoding of all tokens at once, without special tokens.
It never returns part of a character, and a token's cost does not grow with the answer.

There are two kinds of tokenizers. In a byte-level one (GPT-2, Llama 3, Qwen) a token is a run of
bytes, which go through an incremental UTF-8 decoder. The others (SentencePiece: Llama 2, Gemma,
Mistral) decode token by token, with two exceptions. The first token may lose its leading space, so
the last tokens are decoded again as context. And a run of byte tokens such as <0xE2> is valid or
invalid as a whole, so a run is held back until it ends.

The DecodeStream of `tokenizers` is not exact (it has no flush, and drops what never becomes valid
UTF-8) and cannot show some special tokens and hide others.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable
from typing import Protocol

from tokenizers import Tokenizer

from baton.core.errors import UnsupportedModel


class Detokenizer(Protocol):
    """Turns one answer's tokens into text."""

    def push(self, ids: Iterable[int]) -> str:
        """Returns the text that these tokens complete."""
        ...

    def flush(self) -> str:
        """Returns the rest after the last token; an incomplete character becomes U+FFFD."""
        ...


def detokenizer_factory(
    tokenizer: Tokenizer | None, hidden: frozenset[int]
) -> Callable[[], Detokenizer]:
    """Returns a factory of detokenizers that share tables. `hidden` tokens have no text; without a
    tokenizer, no token has."""
    steps = _decoder_steps(tokenizer)
    if tokenizer is None or steps == ["ByteLevel"]:
        token_bytes = TokenBytes(tokenizer, hidden)
        return lambda: ByteLevelDetokenizer(token_bytes)
    if "ByteLevel" in steps:
        raise UnsupportedModel(f"the tokenizer's decoder has an unknown form: {', '.join(steps)}")
    byte_ids = _byte_token_ids(tokenizer) if "ByteFallback" in steps else frozenset[int]()
    return lambda: WindowDetokenizer(tokenizer, hidden, byte_ids)


def special_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder() if tokenizer else {}
    return frozenset(token_id for token_id, token in added.items() if token.special)


class TokenBytes(dict[int, bytes]):
    """The bytes of each single token, computed at first use. A special token has its text; hidden
    and unknown tokens have none."""

    def __init__(self, tokenizer: Tokenizer | None, hidden: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._hidden = hidden
        byte_level = "ByteLevel" in _decoder_steps(tokenizer)
        self._bytes_of = _unmap_bytes if byte_level else _sentence_piece_bytes

    def __missing__(self, token_id: int) -> bytes:
        token = None
        if self._tokenizer is not None and token_id not in self._hidden:
            token = self._tokenizer.id_to_token(token_id)
        found = b"" if token is None else self._bytes_of(token)
        self[token_id] = found
        return found


class ByteLevelDetokenizer:
    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(b"".join(map(self._token_bytes.__getitem__, ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    def __init__(
        self, tokenizer: Tokenizer, hidden: frozenset[int], byte_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._byte_ids = byte_ids
        # Context tokens, whose text is _seen, then tokens whose text is not returned yet.
        self._window: list[int] = []
        self._seen = ""

    def push(self, ids: Iterable[int]) -> str:
        known = self._tokenizer.id_to_token
        fresh = [each for each in ids if each not in self._hidden and known(each) is not None]
        self._window += fresh
        if not fresh or fresh[-1] in self._byte_ids:
            return ""
        return self._new_text()

    def flush(self) -> str:
        return self._new_text()

    def _new_text(self) -> str:
        text = self._decode(self._window)
        fresh, self._seen = text[len(self._seen) :], text
        # Keeps the shortest context with text: after one without, the next token would count as
        # the first and lose its space.
        for width in (1, 2):
            if seen := self._decode(self._window[-width:]):
                self._window, self._seen = self._window[-width:], seen
                break
        return fresh

    def _decode(self, ids: list[int]) -> str:
        # Hidden tokens are never in the window.
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _decoder_steps(tokenizer: Tokenizer | None) -> list[str]:
    """Returns the types of the tokenizer's decoding steps, in order."""
    if tokenizer is None or tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    return [step["type"] for step in state.get("decoders", [state])]


def _byte_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in ids if token_id is not None)


def _byte_alphabet() -> dict[str, int]:
    """Maps the characters of byte-level vocabularies to bytes. A byte that prints in Latin-1 is
    written as itself, the others as U+0100 and following, in order."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()


def _unmap_bytes(token: str) -> bytes:
    """Returns a byte-level token's bytes; one outside the alphabet, such as an added one, is its
    own text."""
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return token.encode()


def _sentence_piece_bytes(token: str) -> bytes:
    """Returns a piece's bytes. Pieces have U+2581 for a space, and <0xE2> for a byte."""
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes.fromhex(token[3:5])
    return token.replace("\u2581", " ").encode()
