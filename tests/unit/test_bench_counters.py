"""What benchmarks read of processes' metrics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter, start_http_server

from bench.counters import samples, total


@pytest.fixture
def address() -> Iterator[str]:
    registry = CollectorRegistry()
    tokens = Counter("tokens_total", "", ["model", "where"], registry=registry)
    for model, where, count in (("a", "decode", 2), ("b", "decode", 3), ("b", "prefill", 5)):
        tokens.labels(model=model, where=where).inc(count)
    Counter("tokens_of_others_total", "", registry=registry).inc(100)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_total_is_over_all_labels_but_those_that_are_named(address: str) -> None:
    assert total(address, "tokens_total") == 10
    assert total(address, "tokens_total", where="decode") == 5
    assert total(address, "tokens_total", where="decode", model="b") == 3
    assert total(address, "tokens_total", where="nowhere") == 0


def test_samples_have_their_labels(address: str) -> None:
    found = {sample.labels["model"]: sample.value for sample in samples(address, "tokens_total")}
    assert found == {"a": 2, "b": 5}
