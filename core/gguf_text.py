"""Writes the files of a Hugging Face folder other than weights, from a GGUF file.

A file has the vocabulary and, for byte-level BPE, the merges. It only names how text is split into
words (`tokenizer.ggml.pre`). An unknown name is refused, since another split gives other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from gguf import TokenType
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from baton.core.errors import InvalidCheckpoint, UnsupportedModel
from baton.core.gguf_architectures import Json
from baton.core.gguf_file import GgufFile
from baton.core.gguf_model import model_config

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = (
    _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _WORDS.replace("DIGITS", r"\p{N}{1,3}")
_QWEN2 = _WORDS.replace("DIGITS", r"\p{N}")
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+ENDINGS"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*ENDINGS"
    r"|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASED.replace("ENDINGS", "").replace("DIGITS", r"\p{N}")
_GPT4O = _CASED.replace("ENDINGS", _ENDINGS + "?").replace("DIGITS", r"\p{N}{1,3}")
_SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
}
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")
"""GPT-2's split, with each digit apart."""

_STARTS_WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
"""Byte-level tokenizers that add a BOS token unless the file says otherwise."""

_NO_TOKENIZER = "none"
_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def write_text_files(file: GgufFile, target: Path) -> None:
    """Writes into the folder `target`. A model without a tokenizer serves token ids only."""
    ids = special_ids(file)
    _write_json(target / "config.json", {**model_config(file), **ids})
    _write_json(target / "generation_config.json", ids)
    if file.field("tokenizer.ggml.model", str, _NO_TOKENIZER) != _NO_TOKENIZER:
        build_tokenizer(file).save(str(target / "tokenizer.json"))
        _write_json(target / "tokenizer_config.json", tokenizer_config(file))


def _write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def build_tokenizer(file: GgufFile) -> Tokenizer:
    kind = file.field("tokenizer.ggml.model", str)
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(f"GGUF tokenizer {kind!r} is not supported; supported: gpt2, llama")
    made = _byte_level(file) if kind == "gpt2" else _sentencepiece(file)
    made.add_special_tokens(list(_added(file, TokenType.CONTROL)))
    made.add_tokens(list(_added(file, TokenType.USER_DEFINED)))
    made.post_processor = _post_processor(file, starts=kind == "llama")
    return made


def tokenizer_config(file: GgufFile) -> Json:
    """The content of tokenizer_config.json."""
    tokens = file.field("tokenizer.ggml.tokens", list[str])
    ids = {name: _id(file, field) for name, field in _IDS.items()}
    named = {name: tokens[token] for name, token in ids.items() if token is not None}
    return {
        # This class uses tokenizer.json unchanged; a model's own class would rebuild it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **named,
        **_chat_template(file),
    }


def _chat_template(file: GgufFile) -> Json:
    """The chat template; named ones, if there are others than the default."""
    field = "tokenizer.chat_template"
    names = sorted({"tool_use", *file.field(f"{field}s", list[str], [])})
    fields = {"default": field, **{name: f"{field}.{name}" for name in names}}
    found = {name: file.field(each, str) for name, each in fields.items() if each in file}
    if found.keys() <= {"default"}:
        return {"chat_template": found["default"]} if found else {}
    return {"chat_template": [{"name": name, "template": found[name]} for name in found]}


def special_ids(file: GgufFile) -> Json:
    """The special token ids for config.json and generation_config.json. An answer ends at any of
    the end tokens."""
    found = [_id(file, name) for name in _ENDS]
    ends = list(dict.fromkeys(token for token in found if token is not None))
    return {
        "bos_token_id": _id(file, "bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": _id(file, "padding_token_id"),
    }


def _id(file: GgufFile, name: str) -> int | None:
    token = file.field(f"tokenizer.ggml.{name}", int, -1)
    tokens = len(file.field("tokenizer.ggml.tokens", list[str], []))
    return token if 0 <= token < tokens else None


def _byte_level(file: GgufFile) -> Tokenizer:
    pre = file.field("tokenizer.ggml.pre", str, "")
    vocabulary = _vocabulary(file)
    merges = [m.partition(" ")[::2] for m in file.field("tokenizer.ggml.merges", list[str])]
    for left, right in merges:
        if not {left, right, left + right} <= vocabulary.keys():
            raise InvalidCheckpoint(
                f"the GGUF file merges {left!r} and {right!r}, which are not tokens"
            )
    # A word that is a token itself is not merged.
    whole = _SPLITS.get(pre) is _LLAMA3 and pre != "dbrx"
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole))
    made.pre_tokenizer = _pre_tokenizer(pre)
    made.decoder = decoders.ByteLevel()
    return made


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _SPLITS:
        words = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([words, letters])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if pre == "gpt-2":
        return gpt2
    known = ", ".join(sorted({*_SPLITS, *_SINGLE_DIGITS, "gpt-2"}))
    raise UnsupportedModel(f"GGUF pre-tokenizer {pre!r} is not supported; supported: {known}")


def _sentencepiece(file: GgufFile) -> Tokenizer:
    """BPE whose merges follow from the tokens' scores. Text without tokens falls back to bytes."""
    architecture = file.field("general.architecture", str)
    vocabulary, unknown = _vocabulary(file), _id(file, "unknown_token_id")
    if architecture.startswith("gemma"):
        # Its tokens of spaces are literal spaces, and its scores are not in the order of merges.
        vocabulary = {_spaces_replaced(token): index for token, index in vocabulary.items()}
        scores = [-float(index) for index in vocabulary.values()]
    else:
        scores = file.field("tokenizer.ggml.scores", list[float])
    made = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(vocabulary, scores),
            unk_token=None if unknown is None else list(vocabulary)[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = file.field("tokenizer.ggml.add_space_prefix", bool, True)
    if prefixed and architecture == "phi3":  # also before text that begins with a space
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(steps)
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement="▁", prepend_scheme="first" if prefixed else "never", split=False
        )
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        decoding.append(decoders.Strip(content=" ", left=1))
    made.decoder = decoders.Sequence(decoding)
    return made


def _spaces_replaced(token: str) -> str:
    return token if token.strip(" ") else "▁" * len(token)


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that merge into a token, best score first, then longest parts first."""
    found = []
    for token, score in zip(vocabulary, scores, strict=True):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in cuts if pair[0] in vocabulary and pair[1] in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(score, len(left), len(right), left, right) for left, right in pairs]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _vocabulary(file: GgufFile) -> dict[str, int]:
    tokens = file.field("tokenizer.ggml.tokens", list[str])
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise UnsupportedModel("the GGUF file's vocabulary has a token twice")
    return vocabulary


def _added(file: GgufFile, kind: TokenType) -> Iterator[AddedToken]:
    """The tokens that are never split."""
    tokens = file.field("tokenizer.ggml.tokens", list[str])
    kinds = file.field("tokenizer.ggml.token_type", list[int], [])
    for token, found in zip(tokens, kinds, strict=False):
        if found == kind:
            yield AddedToken(token, normalized=False, special=kind == TokenType.CONTROL)


def _post_processor(file: GgufFile, *, starts: bool) -> processors.PostProcessor | None:
    """Adds BOS and EOS around plain text, as the file says."""
    tokens = file.field("tokenizer.ggml.tokens", list[str])
    starts = starts or file.field("tokenizer.ggml.pre", str, "") in _STARTS_WITH_BOS
    first, last = (
        _id(file, f"{name}_token_id")
        if file.field(f"tokenizer.ggml.add_{name}_token", bool, default)
        else None
        for name, default in (("bos", starts), ("eos", False))
    )
    around = [token for token in (first, last) if token is not None]
    if not around:
        return None
    template = ["$A"]
    if first is not None:
        template.insert(0, tokens[first])
    if last is not None:
        template.append(tokens[last])
    return processors.TemplateProcessing(
        single=template, special_tokens=[(tokens[token], token) for token in around]
    )
