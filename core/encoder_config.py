"""Reads an encoder's configuration from a sentence-transformers folder, if it is supported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import UnsupportedModel
from baton.core.model_store import read_json

_FIRST_POSITIONS = {"bert": 0, "roberta": 2, "xlm-roberta": 2}
"""The first position, by model_type."""
_POOLING_PREFIX = "pooling_mode_"
_POOLINGS = ("mean_tokens", "cls_token")


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    hidden: int
    heads: int
    layers: int
    inner: int  # of the feed-forward
    vocabulary: int
    positions: int
    first_position: int
    types: int
    epsilon: float
    pooling: str  # one of _POOLINGS
    max_tokens: int  # of an input

    @classmethod
    def read(cls, folder: Path) -> EncoderConfig:
        """Raises UnsupportedModel for another kind of model."""
        config = read_json(folder / "config.json")
        if not config:
            raise UnsupportedModel(f"{folder} has no config.json", field="embedding_model")
        kind = config.get("model_type")
        activation, position = config.get("hidden_act"), config.get("position_embedding_type")
        if kind not in _FIRST_POSITIONS:
            raise _unsupported(f"of type {kind} (only {', '.join(_FIRST_POSITIONS)})")
        if activation != "gelu" or position not in (None, "absolute"):
            raise _unsupported(f"with {activation} and {position} positions")
        limits = read_json(folder / "sentence_bert_config.json")
        if limits.get("do_lower_case"):
            raise _unsupported("that lowers letters beside its tokenizer")
        first, positions = _FIRST_POSITIONS[str(kind)], _number(config, "max_position_embeddings")
        return cls(
            hidden=_number(config, "hidden_size"),
            heads=_number(config, "num_attention_heads"),
            layers=_number(config, "num_hidden_layers"),
            inner=_number(config, "intermediate_size"),
            vocabulary=_number(config, "vocab_size"),
            positions=positions,
            first_position=first,
            types=_number(config, "type_vocab_size"),
            epsilon=float(str(config.get("layer_norm_eps", 1e-12))),
            pooling=_pooling(folder),
            max_tokens=min(positions - first, int(str(limits.get("max_seq_length") or positions))),
        )


def _number(config: dict[str, object], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int):
        raise UnsupportedModel(f"the embedding model's config.json has no number {name}")
    return value


def _pooling(folder: Path) -> str:
    """The folder's pooling; by default, the mean of all tokens."""
    if any(folder.glob("*_Dense")):
        raise _unsupported("with a dense layer behind its pooling")
    modes = read_json(folder / "1_Pooling" / "config.json")
    chosen = [name for name, value in modes.items() if name.startswith(_POOLING_PREFIX) and value]
    wanted = [name.removeprefix(_POOLING_PREFIX) for name in chosen] or ["mean_tokens"]
    if len(wanted) != 1 or wanted[0] not in _POOLINGS:
        raise _unsupported(f"that pools by {', '.join(wanted)}")
    return wanted[0]


def _unsupported(what: str) -> UnsupportedModel:
    return UnsupportedModel(f"an embedding model {what} is not supported", field="embedding_model")
