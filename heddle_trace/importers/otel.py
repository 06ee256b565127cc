"""Spans of OpenTelemetry with the attributes of its conventions for generative AI.

Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans and .../gen-ai-agent-spans
(versions 1.28 to 1.41, and the names of tokens before them), and the JSON of OTLP, of which the
collector's file exporter writes an object a line,
https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding. Read are also flat exports, an
object a span: that of the SDKs' console exporter (`context`, `start_time`, `attributes`), and such
with `trace_id` and `span_id`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from heddle_trace.importers.clocks import seconds
from heddle_trace.importers.generations import UNNAMED
from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import DamagedError
from heddle_trace.importers.objects import head_objects
from heddle_trace.importers.protocol import ImportContext
from heddle_trace.importers.sources import SourceFile, converted
from heddle_trace.importers.span_fields import (
    id_in,
    named_in,
    parsed_text,
    prompt_hash,
    whole,
)
from heddle_trace.importers.spans import ASSUMES, Span, SpanFormat, SpanKind, show, started
from heddle_trace.limits import Tokens

NESTED: Final = {
    "resourceSpans": "resourceSpans.item.scopeSpans.item.spans.item",
    "batches": "batches.item.scopeSpans.item.spans.item",
    "spans": "spans.item",
}
_KINDS: Final[Mapping[str, SpanKind]] = {
    "chat": "generation",
    "text_completion": "generation",
    "generate_content": "generation",
    "execute_tool": "tool",
    "retrieval": "tool",
    "invoke_agent": "agent",
}
_INPUT: Final = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
_OUTPUT: Final = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
_CACHED: Final = ("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens")
_FAILED: Final = (2, "2", "ERROR", "STATUS_CODE_ERROR", "Error")


def _recognises(head: Head) -> bool:
    """OTLP, or objects with attributes of which some are gen_ai's."""
    if any(isinstance(row.get(key), list) for row in head.objects for key in list(NESTED)[:2]):
        return True
    every = (key for raw in head_objects(head, NESTED) for key in attributes_of(raw))
    return any(key.startswith("gen_ai.") for key in every)


def attributes_of(raw: dict[str, Any]) -> dict[str, Any]:
    """The attributes by name; in OTLP they are a list of keys and typed values."""
    found = raw.get("attributes")
    if isinstance(found, list):
        return _by_key(found)
    return found if isinstance(found, dict) else {}


def _value(typed: Any) -> Any:
    if not isinstance(typed, dict):
        return typed
    for kind, value in typed.items():
        match kind:
            case "intValue":
                return whole(value)
            case "arrayValue":
                return [_value(item) for item in _values(value)]
            case "kvlistValue":
                return _by_key(_values(value))
            case _:
                return value
    return None


def _values(of: Any) -> list[Any]:
    found = of.get("values") if isinstance(of, dict) else None
    return found if isinstance(found, list) else []


def _by_key(pairs: list[Any]) -> dict[str, Any]:
    return {str(p.get("key")): _value(p.get("value")) for p in pairs if isinstance(p, dict)}


def _kind(attributes: dict[str, Any]) -> SpanKind:
    operation = attributes.get("gen_ai.operation.name")
    if operation is None and any(key in attributes for key in _OUTPUT):
        return "generation"
    return _KINDS.get(str(operation), "other")


def _span(
    raw: dict[str, Any], where: str, source: SourceFile, context: ImportContext
) -> Span | None:
    own = raw.get("context") if isinstance(raw.get("context"), dict) else {}
    trace = id_in(_first({**raw, **(own or {})}, "traceId", "trace_id"), "trace id")
    id = id_in(_first({**raw, **(own or {})}, "spanId", "span_id"), "span id")
    if trace is None or id is None:
        raise DamagedError("has no trace id and span id; a span of OpenTelemetry has both")
    attributes = attributes_of(raw)
    kind = _kind(attributes)
    said = "gen_ai.agent.name" if kind == "agent" else "gen_ai.tool.name"
    name = str(attributes.get(said) or raw.get("name") or UNNAMED)
    start_s = time_of(_first(raw, "startTimeUnixNano", "start_time_unix_nano", "start_time"))
    end_s = time_of(_first(raw, "endTimeUnixNano", "end_time_unix_nano", "end_time"))
    if kind == "other" and start_s is None:
        start_s = 0.0  # only what is within it matters
    session = attributes.get("gen_ai.conversation.id")
    other_session, group = named_in([attributes])
    status = raw.get("status")
    code = _first(status, "code", "status_code") if isinstance(status, dict) else status
    span = Span(
        where=where,
        file=source.path.name,
        trace=trace,
        id=id,
        parent=id_in(_first(raw, "parentSpanId", "parent_span_id", "parent_id"), "parent id"),
        kind=kind,
        name=name,
        start_s=started(name, start_s),
        end_s=end_s,
        failed=code in _FAILED if code not in (None, 0, "UNSET", "STATUS_CODE_UNSET") else None,
        session=str(session) if session else other_session,
        group=group,
    )
    if kind == "generation":
        if span.failed and _tokens(attributes, _OUTPUT) is None:
            context.notes.drop("generations that failed")
            return None
        _fill_generation(span, attributes, context)
    return span


def _fill_generation(span: Span, attributes: dict[str, Any], context: ImportContext) -> None:
    given = parsed_text(attributes.get("gen_ai.input.messages"))
    system = parsed_text(attributes.get("gen_ai.system_instructions"))
    made = parsed_text(attributes.get("gen_ai.output.messages"))
    span.input, span.output = _tokens(attributes, _INPUT), _tokens(attributes, _OUTPUT)
    span.cached = _tokens(attributes, _CACHED)
    both = None if given is None else [system, given]
    prompt = prompt_hash(given) if system is None else prompt_hash([system, given])
    model = attributes.get("gen_ai.response.model") or attributes.get("gen_ai.request.model")
    show(span, both, made, context, prompt=prompt, model=model)


def _tokens(attributes: dict[str, Any], names: Sequence[str]) -> int | None:
    for name in names:
        if attributes.get(name) is not None:
            try:
                return converted(whole(attributes[name]), Tokens)
            except DamagedError as error:
                raise DamagedError(f"{name}: {error}") from None
    return None


def _first(raw: dict[str, Any], *keys: str) -> Any:
    return next((raw[key] for key in keys if raw.get(key) is not None), None)


def time_of(value: Any) -> float | None:
    """A time in nanoseconds, as a number or its digits, or ISO 8601; 0 is none."""
    value = whole(value)
    return None if value in (None, 0, "") else seconds(value)


OTEL: Final = SpanFormat(
    assumes=(
        "spans without `gen_ai.operation.name` are generations where they have tokens, and are "
        "left out otherwise but for what is within them",
        *ASSUMES,
    ),
    recognises=_recognises,
    nested=NESTED,
    read=_span,
)
"""Spans with gen_ai attributes, from the collector or an SDK."""
