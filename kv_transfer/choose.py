"""Which transports a worker offers its peers.

    memory   wanted       offered, the best first
    cpu      auto, nixl   nixl
    cuda     auto         cuda_ipc, nixl
    cuda     cuda_ipc     cuda_ipc
    cuda     nixl         nixl

A pair of workers uses the first that both offer and that leads from one to the
other: CUDA IPC within a host, NIXL between hosts (see kv_transfer/routed.py).
Where one of several cannot be used at all, NIXL not being installed for
instance, the worker says so at its start and offers the rest.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

from baton.core.errors import InvalidConfig
from baton.kv_transfer.routed import RoutedTransport
from baton.kv_transfer.transport import SlicingTransport


def choose_transport(wanted: str, device: str) -> RoutedTransport:
    """The transport of a worker with a pool on `device`; `wanted` as in the configuration.

    Raises InvalidConfig when that is none.
    """
    agent = f"agent-{uuid.uuid4().hex}"
    return RoutedTransport({name: _MAKERS[name](agent) for name in offered(wanted, device)})


def offered(wanted: str, device: str) -> list[str]:
    """The names of the transports that such a worker offers, the best first."""
    if wanted == "cuda_ipc" and device != "cuda":
        raise InvalidConfig(
            f"transport cuda_ipc moves pages between GPUs, not in {device} memory",
            field="transport",
        )
    if wanted != "auto":
        return [wanted]
    return ["cuda_ipc", "nixl"] if device == "cuda" else ["nixl"]


def _nixl(agent: str) -> SlicingTransport:
    from baton.kv_transfer.nixl_transport import NixlTransport

    return NixlTransport(agent)


def _cuda_ipc(agent: str) -> SlicingTransport:
    # Imports torch and triton, which a worker on a CPU does without.
    from baton.kv_transfer.cuda_ipc_transport import CudaIpcTransport

    return CudaIpcTransport(agent)


_MAKERS: dict[str, Callable[[str], SlicingTransport]] = {"nixl": _nixl, "cuda_ipc": _cuda_ipc}
