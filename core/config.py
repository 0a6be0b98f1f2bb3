"""The configuration: frozen, typed, loaded once.

One YAML file describes a cluster; every process may get the same file. Flags of `baton serve`
override single keys. An unknown key, a wrong type or a value out of range raises InvalidConfig
with the key's name. The sections are in core/config_sections.py. docs/make_configuration.py
generates docs/CONFIGURATION.md.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.core.config_sections import BatchesConfig as BatchesConfig
from baton.core.config_sections import CacheConfig as CacheConfig
from baton.core.config_sections import ControllerConfig, MembersConfig
from baton.core.config_sections import DecodeConfig as DecodeConfig
from baton.core.config_sections import PlannerConfig as PlannerConfig
from baton.core.config_sections import PrefillConfig as PrefillConfig
from baton.core.config_sections import RouterConfig as RouterConfig
from baton.core.config_sections import TlsConfig as TlsConfig
from baton.core.config_values import (
    NAME_RULE,
    Bytes,
    NonNegativeFloat,
    PositiveInt,
    Share,
    ShareOrNone,
    build,
    is_name,
    key,
    read_yaml,
    set_dotted,
)
from baton.core.config_values import Size as Size
from baton.core.errors import InvalidConfig
from baton.core.types import Role

GPU_MEMORY = 0.9
"""The share of its GPU's memory that a worker uses by default."""

_OF_ONE_MODEL = ("model", "model_name", "adapters", "members")
"""Keys of a single model, which several models do not share."""

_CLUSTER_KEYS = frozenset(
    {"models", "model_name", "embedding_model", "drain_seconds", "insecure", "log_level"}
    | {"tls", "cache", "batches", "controller"}
)
"""Keys that a model cannot override, besides router keys."""

_MODEL_ROUTER_KEYS = frozenset({"tool_format", "reasoning", "generation_config"})
"""Router keys that a model can override."""


@dataclass(frozen=True, slots=True)
class Config:
    """A whole cluster."""

    model: str = key(
        "embedded",
        "A model of a hub (org/name, org/name@revision, or org/name:Q4_K_M for a GGUF file), a"
        " Hugging Face folder, a GGUF file, or the embedded model.",
        "--model",
    )
    model_name: str = key(
        "", "The model's name for clients; empty uses its id, folder or file.", "--model-name"
    )
    models: Mapping[str, Mapping[str, object]] = key(
        dict,
        "Several models by their names for clients, instead of `model`: {a: {model: org/a}, b:"
        " {model: org/b, quantization: int8, decode: {workers: 2}}}. Each has its own workers,"
        " and keys that override the shared ones (docs/OPERATIONS.md, Several models).",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto",
        "float32, bfloat16 or float16; auto: bfloat16 on GPUs and on CPUs with AMX or AVX-512 BF16,"
        " else float32.",
        "--dtype",
    )
    engine: Literal["auto", "native", "transformers"] = key(
        "auto",
        "native runs the families in docs/MODELS.md; transformers runs its own model classes over"
        " our pages, without invariant numerics; auto: native if it runs the model.",
        "--engine",
    )
    numerics: Literal["invariant", "fast"] = key(
        "invariant",
        "invariant: an answer's bits do not depend on what else runs, nor on where; fast: on a GPU"
        " they may, and long prompts are faster (docs/GPUS.md).",
        "--numerics",
    )
    speculation: Literal["auto", "off", "ngram", "draft"] = key(
        "auto",
        "Guess tokens that a step then checks, if that is predicted to be faster: ngram guesses"
        " what followed the same tokens before, in prompt or answer; draft also lets a smaller"
        " model guess (`draft_model`). No answer changes. auto: ngram if an answer's bits do not"
        " depend on what else runs.",
        "--speculation",
    )
    draft_model: str = key(
        "",
        "For speculation draft: a model of the same vocabulary, named as `model` is. Decode workers"
        " load it too.",
        "--draft-model",
    )
    draft_kv_memory: Bytes = key(
        Size(0),
        "K/V memory of the draft model in each decode worker; 0 holds as many tokens as the"
        " worker's own.",
    )
    quantization: Literal["none", "int8", "int4", "fp8"] = key(
        "none",
        "Quantizes layers' weights while they are loaded: int8 or int4, on GPUs also fp8"
        " (docs/MODELS.md).",
        "--quantization",
    )
    kv_dtype: Literal["auto", "int8", "int4", "fp8"] = key(
        "auto",
        "How pages keep keys and values: auto as the model computes them, int8 as codes with a"
        " scale for each token and head, on GPUs also fp8; int4 at a loss (docs/MODELS.md).",
        "--kv-dtype",
    )
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto", "cpu or cuda; auto uses GPUs if there are any.", "--device"
    )
    transport: Literal["auto", "nixl", "cuda_ipc"] = key(
        "auto",
        "How pages are moved: nixl, cuda_ipc, or auto: CUDA IPC between GPUs of one host, else"
        " NIXL.",
    )
    gpu_memory: ShareOrNone = key(
        0.0,
        "Share of a GPU's memory that a worker uses for weights, pages and work; 0 uses 0.9, or 0.9"
        " of the part of a GPU that Ray gives it.",
        "--gpu-memory",
    )
    ranks_share_gpus: bool = key(
        False,
        "Let a worker's processes (`tensor_parallel`) share a GPU. For tests: they then exchange"
        " data through host memory, which is slow.",
    )
    weights: Literal["files", "random"] = key(
        "files", "files, or random for measurements, which needs no weights in the model's folder."
    )
    embedding_model: str = key(
        "",
        "The folder, on all nodes, of a sentence-transformers encoder (BERT, RoBERTa, XLM-RoBERTa)"
        " that prefill workers compute embeddings with, under the folder's name.",
        "--embedding-model",
    )
    adapters: Mapping[str, str] = key(
        dict,
        "LoRA adapters by name, each a PEFT folder on all nodes or a hub's repository: {sql:"
        " /models/sql, chat: org/repository@revision}.",
    )
    adapter_folders: tuple[str, ...] = key(
        (),
        "Folders and hub repositories (hub:org/name, hub:org/*) of adapters that may be added at"
        " run time.",
    )
    adapter_slots: PositiveInt = key(16, "Adapters in one worker; the one idle longest is evicted.")
    adapter_rank: PositiveInt = key(16, "Largest rank on a GPU, which has room for all slots.")
    adapter_memory: Bytes = key(
        Size(2**31), "Host memory of a GPU worker, for adapters that it may need again."
    )
    page_size: PositiveInt = key(16, "Tokens of a page.", "--page-size")
    prefix_cache: bool = key(True, "Keep pages of prompts and answers for later prompts.")
    max_context: PositiveInt | None = key(
        None, "A shorter context than the model's; a longer one is refused.", "--max-context"
    )
    drain_seconds: NonNegativeFloat = key(
        20.0, "Seconds that a stopping process lets its requests run. A worker's then migrate."
    )
    quarantine_share: Share = key(
        0.5,
        "Largest share of a pool in quarantine for writes of lost peers; above it a worker accepts"
        " nothing new.",
    )
    page_digests: Literal["auto", "on", "off"] = key(
        "auto",
        "Checksums of pages, verified on arrival: on, off, or auto: on for pools in CPU memory.",
    )
    insecure: bool = key(
        False,
        "Allow other machines to reach a router without keys, or workers without TLS.",
        "--insecure",
    )
    log_level: Literal["debug", "info", "warning", "error"] = key(
        "info", "debug, info, warning or error.", "--log-level"
    )
    tls: TlsConfig = TlsConfig()
    router: RouterConfig = RouterConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    cache: CacheConfig = CacheConfig()
    batches: BatchesConfig = BatchesConfig()
    controller: ControllerConfig = ControllerConfig()
    planner: PlannerConfig = PlannerConfig()
    members: MembersConfig = MembersConfig()

    @property
    def allowed_adapters(self) -> tuple[str, ...]:
        """Allowed locations of adapters (core/adapter_store.py). If empty, none are served."""
        return (*self.adapters.values(), *self.adapter_folders)

    def pool(self, role: Role) -> PrefillConfig | DecodeConfig:
        """The section of a role's workers."""
        return self.prefill if role is Role.PREFILL else self.decode


def with_device_defaults(config: Config, device: str) -> Config:
    """Fills in the values that are chosen by device, "cpu" or "cuda"."""
    gpu = device == "cuda"
    memory = Size(0 if gpu else 2**30)
    prefill, decode = config.prefill, config.decode
    return dataclasses.replace(
        config,
        gpu_memory=config.gpu_memory or GPU_MEMORY,
        prefill=dataclasses.replace(
            prefill,
            kv_memory=prefill.kv_memory or memory,
            chunk_tokens=prefill.chunk_tokens or (8192 if gpu else 512),
            background_tokens=prefill.background_tokens or (2048 if gpu else 64),
        ),
        decode=dataclasses.replace(
            decode,
            kv_memory=decode.kv_memory or memory,
            max_batch=decode.max_batch or (256 if gpu else 64),
            background_batch=decode.background_batch or (256 if gpu else 16),
            chunk_tokens=decode.chunk_tokens or (2048 if gpu else 256),
        ),
    )


def load(path: Path | None, overrides: Mapping[str, object] | None = None) -> Config:
    """Loads the configuration in `path` (None: the defaults), with dotted `overrides` on top."""
    tree = read_yaml(path) if path else {}
    for dotted, value in (overrides or {}).items():
        set_dotted(tree, dotted, value)
    return parse(tree)


def parse(tree: Mapping[str, object]) -> Config:
    """The configuration of a parsed YAML document."""
    config = typing.cast(Config, build(Config, tree))
    served_configs(config)
    return config


def served_configs(config: Config) -> list[Config]:
    """Returns a configuration for each model, which has only that model."""
    if not config.models:
        return [config]
    for name in _OF_ONE_MODEL:
        if getattr(config, name) != getattr(Config(), name):
            raise InvalidConfig(f"with `models`, {name} is a key of each model", field=name)
    return [model_config(config, name, tree) for name, tree in config.models.items()]


def model_config(config: Config, name: str, tree: Mapping[str, object]) -> Config:
    """The configuration of one of several models: the keys of `config`, overridden by the model's
    own `tree`."""
    if not is_name(name):
        raise InvalidConfig(f"a model's name has {NAME_RULE}, unlike {name!r}", field="models")
    merged = dump(dataclasses.replace(config, models={}))
    for alone in _OF_ONE_MODEL:
        del merged[alone]
    for key_name, value in tree.items():
        _check_model_key(f"models.{name}", key_name, value)
        base = merged.get(key_name)
        # A mapping of names and values, such as of adapters, is not a section.
        section = isinstance(base, dict) and isinstance(value, Mapping)
        merged[key_name] = {**base, **value} if section else value  # type: ignore[dict-item]
    if "model" not in tree:
        raise InvalidConfig(f"models.{name} must have the key model", field=f"models.{name}")
    try:
        return typing.cast(Config, build(Config, {**merged, "model_name": name}))
    except InvalidConfig as error:
        raise InvalidConfig(
            f"models.{name}: {error.message}", field=f"models.{name}.{error.field}"
        ) from None


def own_keys(config: Config, model: Config) -> str:
    """The own keys of one of `served_configs`, as JSON; empty without `models`."""
    tree = config.models.get(model.model_name)
    return json.dumps(tree) if tree else ""


def _check_model_key(path: str, name: str, value: object) -> None:
    if name in _CLUSTER_KEYS:
        shared = ", ".join(sorted(_CLUSTER_KEYS))
        raise InvalidConfig(
            f"{path}.{name} is not a key of one model, nor is any of {shared}", field=path
        )
    if name == "router" and isinstance(value, Mapping) and not value.keys() <= _MODEL_ROUTER_KEYS:
        own = ", ".join(sorted(_MODEL_ROUTER_KEYS))
        raise InvalidConfig(f"{path}.router may have {own}, and nothing else", field=path)


def dump(config: Config) -> dict[str, object]:
    """Plain values that `parse` turns back into `config`."""
    return typing.cast(dict[str, object], json.loads(json.dumps(dataclasses.asdict(config))))
