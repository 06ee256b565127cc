"""vLLM's own spans of requests, as OTLP JSON: a span each, with its times in queue and model.

Source: vLLM's docs/features (`--otlp-traces-endpoint`) and `vllm/v1/engine/output_processor.py` of
0.32 (span `llm_request`, from the arrival of its request on). A request that came with a W3C
`traceparent` is in its client's trace: `heddle serve` sends one trace for each trajectory.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.objects import head_objects, objects
from heddle_trace.importers.otel import NESTED, attributes_of, time_of
from heddle_trace.importers.sources import SourceFile, converted
from heddle_trace.limits import Name, Tokens, WaitSeconds
from heddle_trace.observed.core import Observations, ObservedFormat, ParsedObservation, grouped
from heddle_trace.observed.hosts import spans_of_resource
from heddle_trace.observed.schema import ObservedRequest

_MODEL: Final = "gen_ai.latency.time_in_model_"
_ENGINES: Final = (("service.name", 64), ("service.instance.id", 8))
"""Attributes of a resource that name an engine together, and characters of them."""
_RESOURCES: Final = {"resourceSpans": "resourceSpans.item"}


class _Attributes(msgspec.Struct):
    queue_s: WaitSeconds = msgspec.field(name="gen_ai.latency.time_in_queue")
    prefill_s: WaitSeconds = msgspec.field(name=f"{_MODEL}prefill")
    decode_s: WaitSeconds = msgspec.field(name=f"{_MODEL}decode")
    input_tokens: Tokens | None = msgspec.field(name="gen_ai.usage.prompt_tokens", default=None)
    output_tokens: Tokens | None = msgspec.field(
        name="gen_ai.usage.completion_tokens", default=None
    )


class _Generation(msgspec.Struct, array_like=True):
    end_s: float
    request: ObservedRequest


class VllmSpans(ObservedFormat):
    """A trajectory is a trace; from a request's end to the next one its tools run."""

    def recognises(self, head: Head) -> bool:
        """Spans with vLLM's time in prefill."""
        return any(f"{_MODEL}prefill" in attributes_of(raw) for raw in head_objects(head, NESTED))

    def observations(self, sources: Sequence[SourceFile], notes: Notes) -> Observations:
        """A request a span."""
        for _, made in grouped(_Generation, _generations(sources, notes)):
            made.sort(key=lambda each: each[1].request.start_s or 0.0)
            starts = [each.request.start_s for _, each in made[1:]]
            for step, ((where, each), next_s) in enumerate(zip(made, [*starts, None], strict=True)):
                tool_s = None if next_s is None else max(0.0, next_s - each.end_s)
                end_s = each.end_s + (tool_s or 0.0)
                yield ParsedObservation(
                    where,
                    msgspec.structs.replace(each.request, step=step, tool_s=tool_s, end_s=end_s),
                )


def _generations(
    sources: Sequence[SourceFile], notes: Notes
) -> Iterator[tuple[str, str, _Generation]]:
    for source in sources:
        for where, group in objects(source, notes, _RESOURCES):
            for resource, raw in spans_of_resource(group):
                with notes.guard(where):
                    found = attributes_of(raw)
                    if f"{_MODEL}prefill" in found:
                        yield str(raw.get("traceId")), where, _generation(raw, found, resource)


def _generation(
    raw: dict[str, Any], found: dict[str, Any], resource: dict[str, Any]
) -> _Generation:
    start_s, end_s = (time_of(raw.get(f"{which}TimeUnixNano")) for which in ("start", "end"))
    if start_s is None or end_s is None or end_s < start_s:
        raise DamagedError("span has no start before its end: export the spans with both")
    engine = "/".join(str(resource[key])[:most] for key, most in _ENGINES if resource.get(key))
    times = msgspec.structs.asdict(converted(found, _Attributes))
    name = converted(raw.get("traceId"), Name)
    request = ObservedRequest(
        trajectory_id=name, step=0, start_s=start_s, engine=engine or None, **times
    )
    return _Generation(end_s, request)
