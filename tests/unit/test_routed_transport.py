"""Which transport a peer is reached by, over real ones in one process."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator

import pytest
from inprocess_transport import InProcessTransport

from baton.core.errors import InvalidConfig, LayoutMismatch, WorkerLost
from baton.kv_transfer.nixl_transport import NixlTransport
from baton.kv_transfer.routed_transport import (
    RouteChoice,
    RoutedTransport,
    choose_transport,
    offered,
)
from baton.kv_transfer.transport import Noted, PageWrite, PoolMemory, TransportEvent, WriteDone
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout

PAGE_BYTES = 64
PAGES = 8


class Pools:
    """Makes pools that are served over the transports named."""

    def __init__(self) -> None:
        self._buffers: list[ctypes.Array[ctypes.c_char]] = []
        self._transports: list[RoutedTransport] = []

    def make(
        self, *names: str, page_bytes: int = PAGE_BYTES
    ) -> tuple[RoutedTransport, PoolAddress]:
        agent = f"agent-{len(self._transports)}"
        makers = {"inprocess": InProcessTransport, "nixl": NixlTransport}
        transport = RoutedTransport({name: makers[name](agent) for name in names})
        buffer = ctypes.create_string_buffer(page_bytes * PAGES)
        memory = PoolMemory(ctypes.addressof(buffer), page_bytes, PAGES, "cpu")
        address = transport.register(memory, PoolLayout(version=1))
        self._buffers.append(buffer)
        self._transports.append(transport)
        return transport, address

    def close(self) -> None:
        for transport in self._transports:
            transport.close()


@pytest.fixture
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    made.close()


def poll_for(wanted: int, *transports: RoutedTransport) -> list[TransportEvent]:
    events: list[TransportEvent] = []
    while len(events) < wanted:
        events += [event for transport in transports for event in transport.poll()]
    return events


def test_an_address_lists_every_route_the_best_first(pools: Pools) -> None:
    _, address = pools.make("inprocess", "nixl")
    assert [route.transport for route in address.routes] == ["inprocess", "nixl"]
    assert address.agent == "agent-0"


def test_a_peer_is_reached_by_the_first_transport_that_leads_there(pools: Pools) -> None:
    source, _ = pools.make("inprocess", "nixl")
    _, address = pools.make("inprocess", "nixl")
    peer = source.connect(address)
    assert source.chosen == {peer: RouteChoice("inprocess", "")}


def test_a_fallback_is_logged_with_its_reason(
    pools: Pools, caplog: pytest.LogCaptureFixture
) -> None:
    source, _ = pools.make("inprocess", "nixl")
    _, address = pools.make("nixl")
    with caplog.at_level(logging.INFO):
        peer = source.connect(address)
    assert source.chosen[peer].transport == "nixl"
    assert "inprocess: no agent agent-1 in this process" in source.chosen[peer].why
    assert f"pages to {peer} go over nixl (inprocess: no agent" in caplog.text


def test_a_peer_that_no_transport_leads_to_is_refused_with_every_reason(pools: Pools) -> None:
    source, _ = pools.make("nixl")
    _, address = pools.make("inprocess")
    with pytest.raises(WorkerLost, match="nixl: agent-1 cannot be reached over nixl"):
        source.connect(address)


def test_pages_of_another_size_are_refused_whatever_the_transport(pools: Pools) -> None:
    source, _ = pools.make("inprocess", "nixl")
    _, address = pools.make("inprocess", page_bytes=2 * PAGE_BYTES)
    with pytest.raises(LayoutMismatch):
        source.connect(address)


def test_writes_over_two_transports_are_told_apart(pools: Pools) -> None:
    source, _ = pools.make("inprocess", "nixl")
    near, near_address = pools.make("inprocess")
    far, far_address = pools.make("nixl")
    peers = [source.connect(address) for address in (near_address, far_address)]
    numbers = [source.write(PageWrite(peer, [0], [1], b"note")) for peer in peers]
    events = poll_for(4, source, near, far)
    assert len(set(numbers)) == 2
    assert {e.write for e in events if isinstance(e, WriteDone)} == set(numbers)
    assert [e for e in events if isinstance(e, Noted)] == [Noted("agent-0", b"note")] * 2


def test_a_transport_that_cannot_serve_the_pool_is_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = choose_transport("auto", "cuda")
    buffer = ctypes.create_string_buffer(PAGE_BYTES * PAGES)
    memory = PoolMemory(ctypes.addressof(buffer), PAGE_BYTES, PAGES, "cpu")
    address = transport.register(memory, PoolLayout(version=1))
    transport.close()
    assert [route.transport for route in address.routes] == ["nixl"]
    assert "transport cuda_ipc is not available" in caplog.text


@pytest.mark.parametrize(
    ("wanted", "device", "names"),
    [
        ("auto", "cpu", ["nixl"]),
        ("nixl", "cpu", ["nixl"]),
        ("auto", "cuda", ["cuda_ipc", "nixl"]),
        ("cuda_ipc", "cuda", ["cuda_ipc"]),
        ("nixl", "cuda", ["nixl"]),
    ],
)
def test_what_is_offered_follows_the_memory(wanted: str, device: str, names: list[str]) -> None:
    assert offered(wanted, device) == names


def test_cuda_ipc_is_refused_for_cpu_memory() -> None:
    with pytest.raises(InvalidConfig, match="between GPUs"):
        choose_transport("cuda_ipc", "cpu")
