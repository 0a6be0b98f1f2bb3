"""Checks and decisions before anything starts, so that errors come at once, in one line."""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from collections import Counter
from pathlib import Path

from baton.core import config as configs
from baton.core import model_store
from baton.core.adapter_config import read_adapter_config
from baton.core.adapter_store import locate_adapter, resolve_locations
from baton.core.api_keys import read_keys
from baton.core.config import Config
from baton.core.encoder_config import EncoderConfig
from baton.core.errors import InvalidConfig
from baton.core.generation_defaults import read_defaults
from baton.core.tls import check_router, node_identity
from baton.engine.architecture import Architecture
from baton.engine.draft_model import find_draft
from baton.engine.model_choice import (
    AnyArchitecture,
    check_adapters_of,
    check_kv_dtype,
    check_quantization,
    describe_fallback,
    describe_pages,
    read_model,
    served_context,
    stored_shape,
    uses_fallback,
)
from baton.engine.stored_shapes import check_stored
from baton.worker.rank_process import check_ranks

# Bytes of one K or V value. "auto" is resolved by the worker, which sees the device.
_VALUE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "auto": 2,
    "int8": 1,
    "int4": 1,
    "fp8": 1,
}


# A worker's own memory, without its model, is about 180 MiB.
_LEAST_WORKER_BYTES = 64 * 2**20


def prepare(config: Config, *, workers_here: bool = True) -> Config:
    """Returns `config` with its models resolved, so that all processes load the same. Raises if a
    cluster could not serve them. With `workers_here`, also downloads the weights."""
    config = with_absolute_paths(config)
    check_router(config)
    node_identity(config)
    _check_folder(config.batches.folder, "batches.folder")
    if config.router.keys:
        read_keys(Path(config.router.keys))
    given = configs.served_configs(config)
    if workers_here:
        _check_room(sum(each.prefill.workers + each.decode.workers for each in given))
    if not config.models:
        return _prepare_model(config, workers_here)
    ready = [_prepare_model(each, workers_here) for each in given]
    _check_names(ready)
    resolved = {
        after.model_name: {**config.models[after.model_name], **_resolved(before, after)}
        for before, after in zip(given, ready, strict=True)
    }
    embedding = ready[0].embedding_model
    return dataclasses.replace(config, models=resolved, embedding_model=embedding)


def with_absolute_paths(config: Config) -> Config:
    """Makes paths absolute: other processes may run in other folders."""

    def absolute(path: str) -> str:
        return path and str(Path(os.path.expanduser(path)).resolve())

    return dataclasses.replace(
        config,
        router=dataclasses.replace(config.router, keys=absolute(config.router.keys)),
        tls=dataclasses.replace(config.tls, folder=absolute(config.tls.folder)),
        batches=dataclasses.replace(config.batches, folder=absolute(config.batches.folder)),
    )


def _check_room(workers: int) -> None:
    """Raises InvalidConfig for more workers than this machine can ever hold, on a Ray that is
    started here. One that is joined may get further nodes."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if workers * _LEAST_WORKER_BYTES > memory:
        raise InvalidConfig(
            f"{workers} workers do not fit into this machine's {memory >> 30} GiB of memory: use"
            " fewer (prefill.workers, decode.workers), or join a Ray of several machines"
            " (--ray-address)",
            field="prefill.workers",
        )


def _resolved(before: Config, after: Config) -> dict[str, object]:
    """Returns the keys that resolving a model changed."""
    old, new = configs.dump(before), configs.dump(after)
    own = new.keys() - {"embedding_model"}  # models share it
    return {name: new[name] for name in sorted(own) if new[name] != old[name]}


def _check_names(models: list[Config]) -> None:
    """Raises InvalidConfig if two models or adapters share a name."""
    names = Counter(name for each in models for name in (each.model_name, *each.adapters))
    (name, count), *_ = names.most_common(1)
    if count > 1:
        raise InvalidConfig(f"{count} models or adapters are called {name!r}", field="models")


def _prepare_model(config: Config, workers_here: bool) -> Config:
    config = dataclasses.replace(
        config, **resolve_locations(config), embedding_model=_check_embedding_model(config)
    )
    weights = workers_here and config.weights == "files"
    if workers_here and config.prefix_cache:
        _check_folder(config.cache.files, "cache.files")
    folder = model_store.locate(config.model, weights=weights)
    architecture = read_model(folder, config.engine, config.max_context)
    served_context(architecture, config.max_context)
    if weights and isinstance(architecture, Architecture):
        check_stored(folder, architecture)
    check_quantization(config.quantization, architecture, config.device, config.dtype)
    check_kv_dtype(config.kv_dtype, architecture, config.device)
    find_draft(config, folder, weights=weights)
    read_defaults(folder, config.router.generation_config)
    _check_pools(config, architecture)
    _check_quantized_ranks(config)
    _check_planner(config)
    _check_adapters(config, architecture)
    prefill, decode = config.prefill, config.decode
    check_ranks(prefill.tensor_parallel, architecture, prefill.gpu_share)
    check_ranks(decode.tensor_parallel, architecture)
    return config


def _check_folder(folder: str, field: str) -> None:
    """Makes a folder that files are to be written to. Raises InvalidConfig if it is unusable."""
    if not folder:
        return
    try:
        path = Path(folder).expanduser()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except FileExistsError:
        raise InvalidConfig(f"{field}: {folder} is not a folder", field=field) from None
    except (OSError, RuntimeError, ValueError) as error:  # no such home; a character NUL
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidConfig(
            f"{field}: cannot write files in {folder!r}: {reason}", field=field
        ) from None


def _check_embedding_model(config: Config) -> str:
    """Returns the absolute path of the embedding model's folder, or "" without one."""
    if not config.embedding_model:
        return ""
    folder = Path(config.embedding_model).expanduser().absolute()
    EncoderConfig.read(folder)
    if folder.name in (model_store.model_name(config), *config.adapters):
        raise InvalidConfig(
            f"the model or an adapter is already called {folder.name!r}",
            field="embedding_model",
        )
    return str(folder)


def engine_note(config: Config) -> str:
    """Returns one line on what the fallback engine or int4 pages cost; "" without both."""
    folder = model_store.locate(config.model, weights=False)
    if not uses_fallback(folder, config.engine):
        return describe_pages(config.kv_dtype)
    return describe_fallback(folder, config.engine)


def _check_pools(config: Config, architecture: AnyArchitecture) -> None:
    shape = stored_shape(
        architecture.pages_shape(1, config.page_size), config.kv_dtype, config.device
    )
    stored = config.dtype if config.kv_dtype == "auto" else config.kv_dtype
    page_bytes = math.prod(shape) * _VALUE_BYTES[stored]
    for name, kv_memory in (
        ("prefill.kv_memory", config.prefill.kv_memory),
        ("decode.kv_memory", config.decode.kv_memory),
    ):
        if 0 < kv_memory < page_bytes:
            raise InvalidConfig(
                f"{name} of {int(kv_memory)} bytes holds no page: one takes {page_bytes}",
                field=name,
            )


def _check_quantized_ranks(config: Config) -> None:
    """Raises InvalidConfig if the pools have different numbers of ranks: a rank's codes depend on
    its share of the weights, so the pools' results would differ by more than rounding."""
    ranks = [config.prefill.tensor_parallel, config.decode.tensor_parallel]
    if config.quantization != "none" and ranks[0] != ranks[1]:
        raise InvalidConfig(
            f"quantization {config.quantization} needs the same tensor_parallel in both pools, not"
            f" {ranks[0]} and {ranks[1]}",
            field="quantization",
        )


def _check_adapters(config: Config, architecture: AnyArchitecture) -> None:
    if not config.allowed_adapters:
        return
    check_adapters_of(architecture)
    for location in config.adapters.values():
        read_adapter_config(locate_adapter(location))


def _check_planner(config: Config) -> None:
    planner = config.planner
    least = planner.least_prefill + planner.least_decode
    most = planner.most_workers or config.prefill.workers + config.decode.workers
    if planner.enabled and least > most:
        raise InvalidConfig(
            f"the planner must keep at least {least} workers, but may have only {most}",
            field="planner.most_workers",
        )
