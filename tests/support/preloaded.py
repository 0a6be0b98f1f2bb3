"""What forked processes share: imports, libraries, and the compiled code of any model.

The fork server imports this module once; see `forks`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
from pathlib import Path

import torch

from baton.core.process import no_collections
from baton.router.edges.http import openapi

MODULES = (
    "baton.cli.app",
    "baton.decode_worker.decode_phase",
    "baton.kernels.cpu.paged_attention",
    "baton.kernels.cpu.panels",
    "baton.kernels.cpu.rotation",
    "baton.kv_transfer.nixl_transport",
    "baton.prefill_worker.prefill_phase",
    "baton.router.edges.http.http_app",
    "baton.router.server",
    "baton.worker.standalone",
    "baton.worker.worker_server",
    "filelock",
    "httpcore2",
    "httpx2",
    "nixl",
    "pydantic",
    "tqdm.auto",
    "uvicorn.protocols.http.h11_impl",
    "uvloop",
)
HEAD_DIMS = (8, 16, 64)


def _load_ucx() -> None:
    """UCX measures the clock for 0.4 s when NIXL loads it."""
    bindings = Path(str(importlib.import_module("nixl._bindings").__file__))
    package, packages = bindings.parent.name, bindings.parents[1]
    for plugin in packages.glob(f".{package}.mesonpy.libs/plugins/libplugin_UCX.so"):
        ctypes.CDLL(str(plugin))


def _compile() -> None:
    """Products and rotations of float32, which each process would generate again."""
    from baton.kernels import cache
    from baton.kernels.cpu import compiler, panels

    if not compiler.available():
        return
    for narrow in (False, True):
        panels.Panels(torch.zeros(32, 32), None, narrow=narrow)
    for head_dim in HEAD_DIMS:
        kv = torch.zeros(1, 1, 2, 1, 1, head_dim)
        cache.prepare_rotation(cache.layer_caches(kv)[0], kv.dtype)


with no_collections():
    for _module in MODULES:
        importlib.import_module(_module)
_load_ucx()
openapi.components()
_compile()
# Collections in a forked process pass over all of this, which would also copy its memory.
gc.collect()
gc.freeze()
