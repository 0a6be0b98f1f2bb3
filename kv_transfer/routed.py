"""Several transports as one: each peer is reached by the first that leads there.

All of them serve the same pool under the same agent name, and its address
lists a route for each. Which one a peer is reached by, and why no better one,
is logged when it is connected, and kept in `chosen`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import BatonError, LayoutMismatch, WorkerLost
from baton.core.types import DeviceEvent
from baton.kv_transfer.transport import (
    PagePart,
    PeerLost,
    PoolMemory,
    SlicingTransport,
    TransportEvent,
    WriteDone,
    WriteFailed,
)
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """How a peer is reached."""

    transport: str
    why: str  # what kept us from the transports before it; empty for the first


class RoutedTransport:
    """Serves one pool over several transports, given by name, the best first."""

    def __init__(self, transports: dict[str, SlicingTransport]) -> None:
        self._transports = transports
        self._refusals: list[str] = []  # of transports that could not serve the pool
        self.chosen: dict[str, Choice] = {}

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
                self._choose(peer, Choice(name, "; ".join(refusals)))
                return peer
        raise WorkerLost(f"{address.agent} cannot be reached: {'; '.join(refusals)}")

    def disconnect(self, peer: str) -> None:
        choice = self.chosen.pop(peer, None)
        if choice is not None:
            self._transports[choice.transport].disconnect(peer)

    def write(
        self,
        peer: str,
        local_pages: Sequence[int],
        remote_pages: Sequence[int],
        note: bytes = b"",
        after: DeviceEvent | None = None,
    ) -> int:
        choice = self.chosen.get(peer)
        if choice is None:
            raise WorkerLost(f"not connected to {peer}")
        transport = self._transports[choice.transport]
        number = transport.write(peer, local_pages, remote_pages, note, after)
        return self._outer(choice.transport, number)

    def poll(self) -> list[TransportEvent]:
        return [
            self._translated(name, event)
            for name, transport in self._transports.items()
            for event in transport.poll()
        ]

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
            _log.warning("pages will not travel over %s: %s", name, error.message)
            self._refusals.append(f"{name}: {error.message}")
            del self._transports[name]
            return None

    def _choose(self, peer: str, choice: Choice) -> None:
        self.chosen[peer] = choice
        because = f" ({choice.why})" if choice.why else ""
        _log.info("pages to %s travel over %s%s", peer, choice.transport, because)

    def _translated(self, name: str, event: TransportEvent) -> TransportEvent:
        match event:
            case WriteDone(number):
                return WriteDone(self._outer(name, number))
            case WriteFailed(number, error):
                return WriteFailed(self._outer(name, number), error)
            case PeerLost(peer):
                self.chosen.pop(peer, None)
        return event

    def _outer(self, name: str, number: int) -> int:
        """A transport's write number, made unlike those of all others."""
        return number * len(self._transports) + list(self._transports).index(name)
