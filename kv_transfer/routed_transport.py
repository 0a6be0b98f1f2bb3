"""Combines several transports: each peer is reached over the first one that works.

    pool memory   configured   offered, best first
    cpu           auto, nixl   nixl
    cuda          auto         cuda_ipc, nixl
    cuda          cuda_ipc     cuda_ipc
    cuda          nixl         nixl

All of them serve the same pool under the same agent name, and its address lists
a route for each. A pair of workers uses the first that both offer and that
connects them: CUDA IPC within a host, NIXL between hosts. The choice, and why no
better one was possible, is logged on connect and kept in `chosen`. If a transport
cannot be used at all, this is logged at the start and the others are offered.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass

from baton.core.errors import BatonError, InvalidConfig, LayoutMismatch, WorkerLost
from baton.kv_transfer.transport import (
    PagePart,
    PageWrite,
    PeerLost,
    PoolMemory,
    SlicingTransport,
    TransportEvent,
)
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """The transport that reaches a peer."""

    transport: str
    why: str  # why no better transport was possible; empty for the best


class RoutedTransport:
    """Serves one pool over several transports, given by name, the best first."""

    def __init__(self, transports: dict[str, SlicingTransport]) -> None:
        self._transports = transports
        self._refusals: list[str] = []  # of transports that could not serve the pool
        self.chosen: dict[str, RouteChoice] = {}

    def register(self, memory: PoolMemory, layout: PoolLayout) -> PoolAddress:
        """Serves the pool over every transport that can; raises if none can."""
        addresses = [
            address
            for name in list(self._transports)
            if (address := self._register(name, memory, layout)) is not None
        ]
        whole = PoolAddress()
        whole.CopyFrom(addresses[0])
        for other in addresses[1:]:
            whole.routes.extend(other.routes)
        return whole

    def connect(self, address: PoolAddress, part: PagePart | None = None) -> str:
        if choice := self.chosen.get(address.agent):
            return self._transports[choice.transport].connect(address, part)
        refusals = list(self._refusals)
        for name, transport in self._transports.items():
            try:
                peer = transport.connect(address, part)
            except LayoutMismatch:
                raise
            except BatonError as error:
                refusals.append(f"{name}: {error.message}")
            else:
                self._choose(peer, RouteChoice(name, "; ".join(refusals)))
                return peer
        raise WorkerLost(f"{address.agent} cannot be reached: {'; '.join(refusals)}")

    def disconnect(self, peer: str) -> None:
        choice = self.chosen.pop(peer, None)
        if choice is not None:
            self._transports[choice.transport].disconnect(peer)

    def write(self, write: PageWrite) -> int:
        choice = self.chosen.get(write.peer)
        if choice is None:
            raise WorkerLost(f"not connected to {write.peer}")
        return self._transports[choice.transport].write(write)

    def poll(self) -> list[TransportEvent]:
        events = [event for each in self._transports.values() for event in each.poll()]
        for event in events:
            if isinstance(event, PeerLost):
                self.chosen.pop(event.peer, None)
        return events

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()
        self.chosen.clear()

    def _register(self, name: str, memory: PoolMemory, layout: PoolLayout) -> PoolAddress | None:
        try:
            return self._transports[name].register(memory, layout)
        except BatonError as error:
            if len(self._transports) == 1:
                raise
            _log.warning("transport %s is not available: %s", name, error.message)
            self._refusals.append(f"{name}: {error.message}")
            del self._transports[name]
            return None

    def _choose(self, peer: str, choice: RouteChoice) -> None:
        self.chosen[peer] = choice
        because = f" ({choice.why})" if choice.why else ""
        _log.info("pages to %s go over %s%s", peer, choice.transport, because)


def choose_transport(wanted: str, device: str) -> RoutedTransport:
    """The transport of a worker with a pool on `device`; `wanted` is the configured name.

    Raises InvalidConfig when there is none.
    """
    agent = f"agent-{uuid.uuid4().hex}"
    return RoutedTransport({name: _make(name, agent) for name in offered(wanted, device)})


def offered(wanted: str, device: str) -> list[str]:
    """The names of the transports that a worker offers, best first."""
    if wanted == "cuda_ipc" and device != "cuda":
        raise InvalidConfig(
            f"transport cuda_ipc moves pages between GPUs, not in {device} memory",
            field="transport",
        )
    if wanted != "auto":
        return [wanted]
    return ["cuda_ipc", "nixl"] if device == "cuda" else ["nixl"]


def _make(name: str, agent: str) -> SlicingTransport:
    # Imported here: CUDA IPC imports triton, which a worker on a CPU does not need.
    if name == "nixl":
        from baton.kv_transfer.nixl_transport import NixlTransport

        return NixlTransport(agent)
    from baton.kv_transfer.cuda_ipc_transport import CudaIpcTransport

    return CudaIpcTransport(agent)
