"""The model's defaults for requests, from its generation_config.json.

A request's own value takes precedence, then the model's, then the edge's. Keys have transformers'
meaning; an unsupported key that would change answers is refused by name. As in transformers, a
folder without the file may have its defaults in config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from baton.core import bounds
from baton.core.config_values import Check
from baton.core.errors import InvalidConfig, InvalidSampling, UnsupportedModel
from baton.core.model_store import read_json
from baton.core.types import Sampling


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    sampling_values: Mapping[str, Any] = field(default_factory=dict)  # fields of Sampling
    max_tokens: int | None = None

    def sampling(
        self, given: Mapping[str, Any], *, prefix: str = "", temperature: float = 0.0
    ) -> Sampling:
        """The sampling of a request with the values `given`; `temperature` is the edge's default.
        Raises InvalidSampling with `prefix` before the field's name."""
        values = {"temperature": temperature, **self.sampling_values, **given}
        if "min_tokens" in given:
            values["min_length"] = 0
        return bounds.checked(Sampling(**values), prefix)

    def __str__(self) -> str:
        """The defaults that have an effect, in one line."""
        shown = [
            f"{name} {_shown(value)}"
            for name, value in self.sampling_values.items()
            if name == "temperature" or value != getattr(_NEUTRAL, name)
        ]
        return ", ".join(shown + [f"max_tokens {self.max_tokens}"] * bool(self.max_tokens))


NO_DEFAULTS = GenerationDefaults()
_NEUTRAL = Sampling()
_WITHOUT = "router.generation_config: none serves the model without its defaults"


def read_defaults(folder: Path, mode: str = "auto") -> GenerationDefaults:
    """The defaults of the model in `folder`; none unless router.generation_config is auto."""
    if mode != "auto":
        return NO_DEFAULTS
    file = folder / "generation_config.json"
    file = file if file.is_file() else folder / "config.json"
    stated = {key: value for key, value in read_json(file).items() if value is not None}
    for key, harmless in _UNSUPPORTED.items():
        if key in stated and stated[key] not in harmless:
            raise UnsupportedModel(
                f"{file.name}: {key} {json.dumps(stated[key])} is not supported; {_WITHOUT}"
            )
    values = {key: _checked(file.name, key, stated[key]) for key in _KEYS if key in stated}
    defaults = GenerationDefaults(_sampling_values(values), values.get("max_new_tokens"))
    try:
        defaults.sampling({})
    except InvalidSampling as error:
        wrong = f"{file.name}: {error.message}; {_WITHOUT}"
        raise InvalidConfig(wrong, field=error.field) from None
    return defaults


def end_tokens(file: str, content: Mapping[str, object]) -> list[int]:
    """The end tokens that the content of a generation_config.json or config.json states; -1 stands
    for none. Raises InvalidConfig for anything but token ids."""
    stated: Any = content.get("eos_token_id")
    if stated is None:
        return []
    ids = [each for each in (stated if isinstance(stated, list) else [stated]) if each != -1]
    if not _are_ids(ids):
        raise _wrong(file, "eos_token_id", "a token id or a list of token ids", stated)
    return ids


def _sampling_values(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Sampling from keys of the file."""
    values = {key: value for key, value in stated.items() if key in _FIELDS}
    if "min_new_tokens" in stated:
        values |= {"min_tokens": stated["min_new_tokens"], "min_length": 0}
    match stated.get("do_sample"):
        case True:
            values.setdefault("temperature", 1.0)
        case False:
            values |= {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    # Without do_sample, the author's values still take precedence over an edge's default.
    return values


def _checked(file: str, key: str, value: object) -> Any:
    allowed, words = _KEYS[key]
    if not allowed(value):
        raise _wrong(file, key, words, value)
    return _frozen(value)


def _wrong(file: str, key: str, words: str, value: object) -> InvalidConfig:
    return InvalidConfig(f"{file}: {key} must be {words}, not {json.dumps(value)}", field=key)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _are_runs(value: object) -> bool:
    return isinstance(value, list) and all(map(_are_ids, value))


_FIELDS = {each.name for each in fields(Sampling)}
_NUMBER: Check = (_is_number, "a number")
_COUNT: Check = (_is_count, "a whole number from 0")
_IDS: Check = (_are_ids, "a list of token ids")
_KEYS: dict[str, Check] = {
    "do_sample": (lambda value: isinstance(value, bool), "true or false"),
    "temperature": _NUMBER,
    "top_k": _COUNT,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "no_repeat_ngram_size": _COUNT,
    "suppress_tokens": _IDS,
    "begin_suppress_tokens": _IDS,
    "bad_words_ids": (_are_runs, "a list of lists of token ids"),
    "min_new_tokens": _COUNT,
    "min_length": _COUNT,
    "max_new_tokens": _COUNT,
}
"""Supported keys."""

_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    "guidance_scale": (1,),
    "sequence_bias": (),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
    "token_healing": (False,),
    "stop_strings": ([],),
    "max_time": (),
}
"""Unsupported keys that change answers, with the values that do not."""


def _shown(value: object) -> str:
    return f"({len(value)})" if isinstance(value, tuple) else f"{value:g}"
