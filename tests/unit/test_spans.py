"""Traces, as a collector receives them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from baton.core.errors import InvalidConfig
from baton.router.observe.ledger import AnswerLedger, Ledgers, RequestLedger
from baton.router.observe.spans import Spans
from baton.router.placement.placement import Placement

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = f"00-{TRACE}-b7ad6b7169203331-01"


class Collector(ThreadingHTTPServer):
    """Remembers all spans that it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Span] = []


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        if self.headers["content-encoding"] == "gzip":
            import gzip

            content = gzip.decompress(content)
        for resource in ExportTraceServiceRequest.FromString(content).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as started:
        Thread(target=started.serve_forever, args=(0.02,), daemon=True).start()
        yield started
        started.shutdown()


def ended(traceparent: str = "", outcome: str = "STOP") -> RequestLedger:
    now = time.monotonic()
    answer = AnswerLedger(
        now - 9.0,
        parsed=now - 8.0,
        ready=now - 7.0,
        placed=now - 6.0,
        first=now - 3.0,
        first_text=now - 3.0,
        first_written=now - 3.0,
        last=now - 3.0,
        last_text=now - 3.0,
        ended=now,
        prefill_seconds=2.0,
        placement=Placement("prefill-0", "decode-0"),
        attempts=1,
        tokens=1,
        finished=True,
    )
    ledger = RequestLedger("r", now - 9.0, traceparent=traceparent, model="tale")
    ledger.answers, ledger.outcome, ledger.ended = [answer], outcome, now
    ledger.arrived_at = time.time() - 9.0
    return ledger


def test_a_request_is_a_trace_and_its_phases_are_spans(collector: Collector) -> None:
    spans = Spans(f"http://127.0.0.1:{collector.server_port}/", "router-0")
    spans.send(ended(CALLER))
    spans.close()
    by_name = {span.name: span for span in collector.spans}
    whole, prefill = by_name["chat"], by_name["prefill"]
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert whole.parent_span_id.hex() == "b7ad6b7169203331"
    assert prefill.parent_span_id == whole.span_id
    assert prefill.end_time_unix_nano - prefill.start_time_unix_nano == pytest.approx(2e9, rel=1e-3)
    assert prefill.start_time_unix_nano - whole.start_time_unix_nano == pytest.approx(3e9, rel=1e-3)
    assert whole.end_time_unix_nano - whole.start_time_unix_nano == pytest.approx(9e9, rel=1e-3)
    told = {attribute.key: attribute.value for attribute in whole.attributes}
    assert told["gen_ai.request.model"].string_value == "tale"
    assert told["baton.decode_worker"].string_value == "decode-0"


def test_a_request_without_a_trace_begins_one_and_a_failed_one_is_an_error(
    collector: Collector,
) -> None:
    spans = Spans(f"http://127.0.0.1:{collector.server_port}", "router-0")
    spans.send(ended(outcome="WORKER_LOST"))
    spans.close()
    [whole] = [span for span in collector.spans if span.name == "chat"]
    assert not whole.parent_span_id
    assert whole.status.message == "worker_lost"


def test_requests_are_sent_when_they_end() -> None:
    ledgers, told = Ledgers(), list[str]()
    ledgers.listen(lambda ledger: told.append(ledger.request_id))
    for name, outcome in (("served", "STOP"), ("refused", "")):
        with ledgers.keep(RequestLedger(name, time.monotonic())) as ledger:
            ledger.outcome = outcome
    assert told == ["served"]


def test_an_endpoint_without_the_libraries_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(InvalidConfig, match=r"install baton-llm\[otlp\]"):
        Spans("http://127.0.0.1:4318", "router-0")
