"""OpenTelemetry: each request as a trace, its phases as spans, sent to an OTLP endpoint.

Spans are made from a request's ledger after its end, and sent by a thread of the SDK. The
libraries are the extra `otlp`, imported only if an endpoint is configured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.errors import InvalidConfig
from baton.router.observe.ledger import RequestLedger
from baton.router.observe.time_breakdown import request_timing
from baton.v1 import timing_pb2 as pb

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

_NANOSECONDS = 1e9
_GOOD = ("stop", "length")


class Spans:
    def __init__(self, endpoint: str, router_id: str) -> None:
        """`endpoint` is a collector, such as http://127.0.0.1:4318."""
        self._provider = _provider(f"{endpoint.rstrip('/')}/v1/traces", router_id)
        self._tracer = self._provider.get_tracer("baton")

    def send(self, ledger: RequestLedger) -> None:
        """Sends a request that has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        timing = request_timing(ledger)
        span = self._tracer.start_span(
            "chat",
            context=_parent(ledger.traceparent),
            kind=SpanKind.SERVER,
            start_time=_at(timing, 0.0),
            attributes=self._attributes(timing),
        )
        if timing.outcome not in _GOOD:
            span.set_status(Status(StatusCode.ERROR, timing.outcome))
        inside = set_span_in_context(span)
        for answer in timing.answers:
            self._send_phases(timing, answer, inside)
        span.end(_at(timing, timing.end_to_end_seconds))

    def close(self) -> None:
        """Sends the remaining spans; takes some seconds if the collector does not answer."""
        self._provider.shutdown()

    def _send_phases(
        self, timing: pb.RequestTiming, answer: pb.AnswerTiming, inside: Context
    ) -> None:
        for phase in answer.phases:
            name = pb.PhaseKind.Name(phase.kind).removeprefix("PHASE_KIND_").lower()
            attributes: dict[str, str | int] = {
                "baton.answer": answer.index,
                "baton.hidden": phase.hidden,
                "baton.worker": phase.worker,
            }
            start = _at(timing, phase.start_seconds)
            span = self._tracer.start_span(
                name, context=inside, start_time=start, attributes=attributes
            )
            span.end(start + round(phase.seconds * _NANOSECONDS))

    def _attributes(self, timing: pb.RequestTiming) -> dict[str, str | int | float]:
        first = timing.answers[0]
        return {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": timing.model,
            "gen_ai.usage.input_tokens": first.prompt_tokens,
            "gen_ai.usage.output_tokens": sum(each.completion_tokens for each in timing.answers),
            "gen_ai.server.time_to_first_token": timing.ttft_seconds,
            "baton.request_id": timing.request_id,
            "baton.outcome": timing.outcome,
            "baton.cached_tokens": first.cached_tokens,
            "baton.prefill_worker": first.prefill_worker,
            "baton.decode_worker": first.decode_worker,
            "baton.attempts": first.attempts,
        }


def _provider(url: str, router_id: str) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError:
        raise InvalidConfig(
            "router.otlp_endpoint needs OpenTelemetry: install baton-llm[otlp]",
            field="router.otlp_endpoint",
        ) from None
    resource = Resource.create({"service.name": "baton-router", "service.instance.id": router_id})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return provider


def _parent(traceparent: str) -> Context:
    """Returns the caller's trace, or without one an empty context, which begins a new trace."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent})


def _at(timing: pb.RequestTiming, seconds: float) -> int:
    return round((timing.arrived_at + seconds) * _NANOSECONDS)
