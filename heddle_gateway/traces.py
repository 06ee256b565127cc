"""OpenTelemetry spans: one a request, and below it one a step, which vLLM's are below."""

import os
import secrets
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web
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

from heddle_gateway.access import STEPS, TENANT
from heddle_gateway.client_step import ClientStep
from heddle_runtime.generation import TraceContext, trace_context
from heddle_runtime.vllm_http.step import trace_of


class _Known(RandomIdGenerator):  # type: ignore[misc]
    """Ids that engines were told before their spans are made."""

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

    def write(self, request: web.Request, path: str, status: int, began_s: float) -> None:
        """Make the spans of a request that was answered; times are of `time.monotonic`."""
        client = trace_context(request.headers.get("traceparent", ""))
        steps: list[ClientStep] = request.get(STEPS) or []
        found = self._span(
            f"{request.method} {path}",
            SpanKind.SERVER,
            _ns(began_s),
            parent=client,
            trace_id=trace_of(steps[0].trajectory) if steps else "",
            attributes={
                "http.request.method": request.method,
                "http.route": path,
                "http.response.status_code": status,
                "heddle.tenant": request.get(TENANT, ""),
            },
        )
        if status >= 500:
            found.set_status(StatusCode.ERROR)
        context = found.get_span_context()
        for step in steps:
            if step.trace.span_id and not step.traced:
                step.traced = True
                self._of_step(step, context)
        found.end()

    def _of_step(self, step: ClientStep, request: SpanContext) -> None:
        trace_id = step.trace.trace_id or trace_of(step.trajectory)
        own = f"{request.trace_id:032x}" != trace_id  # of another trajectory than the request
        flags = f"{request.trace_flags:02x}"
        span_id = f"{request.span_id:016x}"
        ended_s = time.monotonic() if step.ended_s is None else step.ended_s
        span = self._span(
            "step",
            SpanKind.CLIENT,
            _ns(step.made_s),
            parent=TraceContext() if own else TraceContext(trace_id, span_id, flags),
            trace_id=trace_id,
            span_id=step.trace.span_id,
            attributes={
                "heddle.trajectory": step.trajectory,
                "heddle.engine": step.engine,
                "heddle.dispatches": step.dispatches,
                "gen_ai.usage.input_tokens": len(step.prompt_ids),
                "gen_ai.usage.output_tokens": step.tokens,
            },
        )
        if step.dispatched_s is not None:
            queued_s = step.dispatched_s - step.submitted_s
            span.add_event("dispatched", timestamp=_ns(step.made_s + queued_s))
        if step.first_s is not None:
            span.add_event("first token", timestamp=_ns(step.first_s))
        span.end(_ns(ended_s))

    def _span(
        self,
        name: str,
        kind: SpanKind,
        began_ns: int,
        *,
        parent: TraceContext,
        trace_id: str,
        span_id: str = "",
        attributes: Mapping[str, Any],
    ) -> Span:
        self._ids.trace_id, self._ids.span_id = trace_id, span_id
        flags = TraceFlags(int(parent.flags, 16))
        remote = (
            SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), True, flags)
            if parent.trace_id
            else SpanContext(0, 0, False)
        )
        context = set_span_in_context(NonRecordingSpan(remote))
        return self._tracer.start_span(
            name, context, kind, attributes=dict(attributes), start_time=began_ns
        )


def _ns(at_s: float) -> int:
    """Nanoseconds since 1970 of a moment of `time.monotonic`."""
    return time.time_ns() - round((time.monotonic() - at_s) * 1e9)
