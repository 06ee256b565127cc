"""OpenTelemetry spans: one a request, below it one a step, and vLLM's below that."""

import os
import secrets
import time
from typing import Any

import msgspec
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from heddle_gateway.client_step import ClientStep
from heddle_gateway.http import HttpRequest
from heddle_runtime.generation import TraceContext, trace_context
from heddle_runtime.vllm_http.step import trace_of


class _Known(RandomIdGenerator):  # type: ignore[misc]
    """Makes spans with ids that were sent to engines before."""

    trace_id = span_id = ""

    def generate_trace_id(self) -> int:
        return int(self.trace_id, 16) if self.trace_id else super().generate_trace_id()

    def generate_span_id(self) -> int:
        return int(self.span_id, 16) if self.span_id else super().generate_span_id()


class Traces:
    """Makes the spans of a request when it is answered; the environment of OpenTelemetry's SDK
    says where they go, and which are sampled.
    """

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        """None: by OTLP over HTTP."""
        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter()
        self._ids = _Known()
        name = os.environ.get("OTEL_SERVICE_NAME", "heddle")
        resource = Resource.create({SERVICE_NAME: name})
        self._provider = TracerProvider(id_generator=self._ids, resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("heddle_gateway")

    def close(self) -> None:
        """Send what was not sent yet."""
        self._provider.shutdown()

    @staticmethod
    def of_step(client: TraceContext) -> TraceContext:
        """Return the context that engines get for a step of a request."""
        return msgspec.structs.replace(client, span_id=secrets.token_hex(8))

    def write(self, request: HttpRequest, path: str, status: int, began_s: float) -> None:
        """Make the spans of a request that was answered; times are of `time.monotonic`."""
        parent = trace_context(request.headers.get("traceparent", ""))
        steps = request.steps or []
        own = TraceContext(trace_of(steps[0].trajectory) if steps else "")
        facts = {"http.request.method": request.method, "http.response.status_code": status}
        facts |= {"http.route": path, "heddle.tenant": request.tenant}
        span = self._span(f"{request.method} {path}", SpanKind.SERVER, began_s, parent, own, facts)
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        for step in steps:
            if step.trace.span_id and not step.traced:
                step.traced = True
                self._of_step(step, span.get_span_context())
        span.end()

    def _of_step(self, step: ClientStep, request: SpanContext) -> None:
        trace_id = step.trace.trace_id or trace_of(step.trajectory)
        parent = TraceContext()
        if f"{request.trace_id:032x}" == trace_id:  # else it is another trajectory's
            flags = f"{request.trace_flags:02x}"
            parent = TraceContext(trace_id, f"{request.span_id:016x}", flags)
        facts = {
            "heddle.trajectory": step.trajectory,
            "heddle.engine": step.engine,
            "heddle.dispatches": step.dispatches,
            "gen_ai.usage.input_tokens": step.prompt_tokens,
            "gen_ai.usage.output_tokens": step.tokens,
        }
        own = TraceContext(trace_id, step.trace.span_id)
        span = self._span("step", SpanKind.CLIENT, step.made_s, parent, own, facts)
        if step.dispatched_s is not None:
            queued_s = step.dispatched_s - step.submitted_s
            span.add_event("dispatched", timestamp=_ns(step.made_s + queued_s))
        if step.first_s is not None:
            span.add_event("first token", timestamp=_ns(step.first_s))
        span.end(None if step.ended_s is None else _ns(step.ended_s))

    def _span(
        self,
        name: str,
        kind: SpanKind,
        began_s: float,
        parent: TraceContext,
        own: TraceContext,
        facts: dict[str, Any],
    ) -> Span:
        """Begin a span; of `own` the ids count, the trace's only without a parent."""
        self._ids.trace_id, self._ids.span_id = own.trace_id, own.span_id
        ids = int(parent.trace_id or "0", 16), int(parent.span_id or "0", 16)
        above = NonRecordingSpan(SpanContext(*ids, True, TraceFlags(int(parent.flags, 16))))
        context = set_span_in_context(above)
        return self._tracer.start_span(name, context, kind, facts, start_time=_ns(began_s))


def _ns(at_s: float) -> int:
    """Nanoseconds since 1970 of a moment of `time.monotonic`."""
    return time.time_ns() - round((time.monotonic() - at_s) * 1e9)
