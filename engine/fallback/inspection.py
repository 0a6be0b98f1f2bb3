"""Finds what a model class of transformers needs from the engine, by one forward without weights.

The model is made on torch's meta device, where tensors have shapes and no values, and runs a few
rows. Each call of the attention interface shows one layer: its heads, and what a row sees. A
class that does anything else (its own attention, other state, other masks) is refused by name,
before its weights are read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    DynamicCache,
    PreTrainedModel,
)

from baton.core.errors import InvalidConfig, UnsupportedModel
from baton.engine.checkpoint import gguf_files
from baton.engine.fallback.attention_interface import PassingCache, note_window
from baton.engine.model_choice import FallbackArchitecture
from baton.engine.model_config import read_stated

INSPECTION = "baton-inspection"
ROWS = 4

NEUTRAL = {
    "dropout",  # none in evaluation
    "sliding_window",  # the mask says which layers use it
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_router_logits",
    "labels",
    "logits_to_keep",
}
"""Arguments of attention functions that have no effect here."""

OBEYED = {"scaling", "softcap", "s_aux"}

_NO_INTERFACE = "{} does not use transformers' attention interface"

MaskFunction = Callable[[int, int, Tensor, Tensor], Tensor]


def inspect_model(folder: Path) -> FallbackArchitecture:
    """Returns the shape of the model in `folder`. Raises UnsupportedModel."""
    config, model_class = read_class(folder)
    name = model_class.__name__
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise UnsupportedModel(f"{name} takes no positions, so its rows cannot share a batch")
    text = config.get_text_config()
    context_length = _context_length(text, name)
    seen = _Observed(name)
    body = _run_without_weights(config, model_class, seen)
    if not seen.layers:
        raise UnsupportedModel(_NO_INTERFACE.format(name))
    if len(seen.layers) != text.num_hidden_layers:
        raise UnsupportedModel(
            f"{name} attends {len(seen.layers)} times in {text.num_hidden_layers} layers; only"
            " layers that attend once can be served"
        )
    shapes = {(layer.kv_heads, layer.head_dim) for layer in seen.layers}
    if len(shapes) > 1:
        raise UnsupportedModel(
            f"{name} has layers of different heads or sizes, which pages cannot hold yet"
        )
    _check_windows(text, seen.layers, context_length, name)
    return FallbackArchitecture(
        family=config.model_type,
        class_name=name,
        version=transformers.__version__,
        body=body,
        layers=len(seen.layers),
        kv_heads=seen.layers[0].kv_heads,
        head_dim=seen.layers[0].head_dim,
        vocabulary_size=text.vocab_size,
        context_length=context_length,
        windows=tuple(layer.window for layer in seen.layers),
    )


def read_class(folder: Path) -> tuple[Any, Any]:
    """Returns the config and the model class that transformers has for it."""
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedModel(f"{folder} holds an adapter, which is not supported; merge it first")
    if gguf_files(folder):
        raise UnsupportedModel("a GGUF file runs natively, not through transformers")
    stated = read_stated(folder / "config.json")
    if "quantization_config" in stated:
        raise UnsupportedModel("quantized checkpoints are not supported through transformers")
    if "transformers_weights" in stated:
        raise UnsupportedModel("config.json: transformers_weights is not supported")
    kind, names = stated.get("model_type", str, ""), stated.get("architectures", list, [])
    config = _read_config(folder, kind)
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    name = known.get(config.model_type)
    if config.is_encoder_decoder or name is None or (names and names != [name]):
        raise UnsupportedModel(
            f"{', '.join(map(str, names)) or kind} is not a decoder that transformers can run"
            " as a causal language model"
        )
    model_class = getattr(transformers, name)
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModel(
            f"{name} keeps a state beside keys and values (such as state-space layers), which"
            " cannot be paged"
        )
    return config, model_class


def _read_config(folder: Path, kind: str) -> Any:
    """The config as transformers reads it, or UnsupportedModel."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except StrictDataclassError as error:
        raise UnsupportedModel(f"config.json: {' '.join(str(error).split())}") from error
    except Exception as error:  # what the class of a config may raise is not known
        if kind in CONFIG_MAPPING:
            message = f"config.json: transformers cannot read it: {first_line(error)}"
        else:
            message = (
                f"model type {kind!r} is not part of transformers {transformers.__version__}, and"
                f" code that ships with a model is never run ({first_line(error)})"
            )
        raise UnsupportedModel(message) from error


@dataclass(frozen=True, slots=True)
class _LayerSeen:
    kv_heads: int
    head_dim: int
    window: int | None


@dataclass
class _Observed:
    """Records what a model does, as its attention and mask functions see it."""

    name: str
    layers: list[_LayerSeen] = field(default_factory=list)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **others: object,
    ) -> tuple[Tensor, None]:
        for argument, given in others.items():
            known = argument in NEUTRAL | OBEYED or (argument == "is_causal" and given)
            if given is not None and not known:
                self._refuse(f"attends with {argument}")
        if getattr(module, "is_causal", True) is False:
            self._refuse("attends in both directions")
        if attention_mask is None or tuple(attention_mask.shape) != (1, 1, 1, 1):
            self._refuse("makes masks of its own")
        if key.shape[2] != query.shape[2] or query.shape[1] % key.shape[1]:
            self._refuse("attends to more than its own rows")
        if value.shape[3] > key.shape[3]:
            self._refuse("has values that are longer than its keys")
        window = int(attention_mask.item()) or None
        self.layers.append(_LayerSeen(key.shape[1], key.shape[3], window))
        rows, heads, count, _ = query.shape
        return query.new_empty(rows, count, heads, value.shape[3]), None

    def note_window(
        self, mask_function: MaskFunction, local_size: int | None = None, **others: object
    ) -> Tensor:
        with torch.device("cpu"):
            causal = _is_causal(mask_function, local_size)
        if not causal:
            self._refuse("does not attend to all tokens, or to a window, before a token")
        return note_window(local_size)

    def _refuse(self, reason: str) -> NoReturn:
        raise UnsupportedModel(f"{self.name} cannot be served: it {reason}")


class _StrictCache(PassingCache):
    """Refuses models that keep more than keys and values in a cache."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, asked: str) -> NoReturn:
        raise UnsupportedModel(
            f"{self._name} keeps more than keys and values in its cache ({asked}), such as the"
            " state of state-space layers, which cannot be paged"
        )


def _is_causal(mask_function: MaskFunction, window: int | None) -> bool:
    """True if a row sees just itself and the tokens before it, or a window of these."""
    size = window or 2 * ROWS
    # Around the borders of a window, and of blocks of its size.
    rows = torch.tensor([0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1])
    tokens = torch.arange(2 * size + 4)
    query, key = rows.unsqueeze(1), tokens.unsqueeze(0)
    expected = key <= query
    if window is not None:
        expected &= key > query - window
    try:
        return torch.equal(mask_function(0, 0, query, key).expand(expected.shape), expected)
    except (RuntimeError, TypeError, IndexError, AttributeError):
        return False  # it depends on more than the two positions


def _run_without_weights(config: Any, model_class: Any, seen: _Observed) -> str:
    """Runs a few rows; returns the name of the submodule whose output the head reads."""
    AttentionInterface.register(INSPECTION, seen.attend)
    AttentionMaskInterface.register(INSPECTION, seen.note_window)
    bodies: list[nn.Module] = []

    def note_body(module: nn.Module, inputs: object, output: object) -> None:
        if hasattr(output, "last_hidden_state"):
            bodies.append(module)

    try:
        with torch.device("meta"), torch.no_grad():
            model = _empty_model(config, model_class)
            _check_numbering(model, seen.name)
            for module in model.modules():
                module.register_forward_hook(note_body)
            rows = torch.zeros(1, ROWS, dtype=torch.long)
            cache = _StrictCache(seen.name)
            model(input_ids=rows, position_ids=rows, past_key_values=cache, use_cache=True)
    except UnsupportedModel:
        raise
    except Exception as error:  # a foreign class may raise anything
        if error.args == (INSPECTION,):  # it looks for attention in a table of its own
            raise UnsupportedModel(_NO_INTERFACE.format(seen.name)) from error
        raise UnsupportedModel(
            f"{seen.name} cannot be inspected without weights: {first_line(error)}"
        ) from error
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    found = [names[id(module)] for module in bodies if names[id(module)]]
    if not found:
        raise UnsupportedModel(f"{seen.name} has no body that can be distinguished from its head")
    return found[-1]  # the outermost ends last


def _empty_model(config: Any, model_class: Any) -> Any:
    """The model on the meta device. Experts run as one product: other ways look at values."""
    config._experts_implementation = "batched_mm"
    model = model_class._from_config(config, attn_implementation=INSPECTION, dtype=torch.float32)
    expect_no_padding(model)
    return model.eval()


def expect_no_padding(model: Any) -> None:
    """Ends the search for padding in the forward of classes such as GPT-2's. No row here is padded;
    the search reads values, which a model on the meta device lacks, and a GPU is waited for."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _search_nothing


def _search_nothing(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    pass


def _check_numbering(model: nn.Module, name: str) -> None:
    """Refuses embeddings like RoBERTa's, which number a sequence's tokens themselves."""
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise UnsupportedModel(
            f"{name} numbers tokens from after the padding token's id, without the padding, but"
            " transformers' own generate numbers them from 0, which gives other answers"
        )


def _context_length(text: Any, name: str) -> int:
    stated = getattr(text, "max_position_embeddings", None)
    if not isinstance(stated, int):
        raise InvalidConfig(f"{name} states no max_position_embeddings")
    limits: list[int] = [stated]
    for rope in _ropes(getattr(text, "rope_parameters", None) or {}):
        kind = rope.get("rope_type", "default")
        if kind == "dynamic":
            raise UnsupportedModel(
                f"{name}: dynamic RoPE scaling depends on the longest row of a batch"
            )
        if kind == "longrope":  # a longer row would change the rotation of its whole batch
            original = getattr(text, "original_max_position_embeddings", None)
            limits.append(rope.get("original_max_position_embeddings", original) or stated)
    return min(limits)


def _check_windows(text: Any, layers: list[_LayerSeen], context: int, name: str) -> None:
    """Refuses windows that a class ignores: transformers' caches drop what a stated window hides,
    even if the class does not mask it."""
    try:
        cache = DynamicCache(config=text)
    except Exception as error:  # such as for layers with a window where none is stated
        raise UnsupportedModel(
            f"{name}: transformers makes no cache for this config: {first_line(error)}"
        ) from error
    for kept, layer in zip(cache.layers, layers, strict=False):
        stated = getattr(kept, "sliding_window", None) or context
        if stated < (layer.window or context):
            raise UnsupportedModel(f"{name}: a sliding_window of {stated} is not used by the class")


def _ropes(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameters for all layers, or for each kind of layer."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def first_line(error: BaseException) -> str:
    """The first line of the error's message; without one, the name of its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
