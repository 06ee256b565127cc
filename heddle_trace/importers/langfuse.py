"""Exports of Langfuse: observations of traces.

Source: https://langfuse.com/docs/api-and-data-platform/features/blob-storage-export-fields
(observations, a row each, with names in snake case) and the API reference,
https://api.reference.langfuse.com (observations in `data`, traces with `observations`; camel case).
Other counts than `input` and `output` in `usage_details`, such as `input_cached_tokens`, are beside
them and not within them.
"""

from collections.abc import Iterator, Mapping
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

_NESTED: Final = {"data": "data.item"}
_KINDS: Final[Mapping[str, SpanKind]] = {
    "GENERATION": "generation",
    "TOOL": "tool",
    "RETRIEVER": "tool",
    "AGENT": "agent",
    **dict.fromkeys(("SPAN", "EVENT", "CHAIN", "EVALUATOR", "EMBEDDING", "GUARDRAIL"), "other"),
}


_EARLIER: Final = {"input": "prompt", "output": "completion"}
"""Names of the sides in `usage` of earlier versions, as in `promptTokens`."""


def _recognises(head: Head) -> bool:
    """Objects of a type of Langfuse's with a trace, or traces with such objects."""
    return any(_is_observation(o) for raw in head_objects(head, _NESTED) for o in _unnested(raw))


def _unnested(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The observations of a trace with what it has beside them, or the object itself."""
    observations = raw.get("observations")
    if not isinstance(observations, list):
        yield raw
        return
    shared = {"sessionId": raw.get("sessionId"), "trace_metadata": raw.get("metadata")}
    for observation in observations:
        if isinstance(observation, dict):
            yield {"traceId": raw.get("id"), **shared, **observation}


def _is_observation(raw: dict[str, Any]) -> bool:
    type = raw.get("type")
    return isinstance(type, str) and type in _KINDS and isinstance(_of(raw, "trace_id"), str)


def _of(raw: dict[str, Any], name: str) -> Any:
    """A field in the one spelling or the other."""
    first, *rest = name.split("_")
    camel = first + "".join(word.capitalize() for word in rest)
    value = raw.get(name)
    return raw.get(camel) if value is None else value


def _span(
    raw: dict[str, Any], where: str, source: SourceFile, context: ImportContext
) -> Span | None:
    if not _is_observation(raw):
        raise DamagedError(
            "is no observation: `type` and `trace_id` are expected; export observations, "
            "not traces or scores"
        )
    kind = _KINDS[raw["type"]]
    name = str(raw.get("name") or UNNAMED)
    session, group = named_in(
        [{"session_id": _of(raw, "session_id")}, parsed_text(raw.get("metadata")),
         parsed_text(raw.get("trace_metadata"))]
    )  # fmt: skip
    span = Span(
        where=where,
        file=source.path.name,
        trace=_of(raw, "trace_id"),
        id=id_in(raw.get("id"), "id") or where,
        parent=id_in(_of(raw, "parent_observation_id"), "parent_observation_id"),
        kind=kind,
        name=name,
        start_s=started(name, seconds(_of(raw, "start_time"))),
        end_s=seconds(_of(raw, "end_time")),
        failed=raw.get("level") == "ERROR",
        session=session,
        group=group,
    )
    if kind == "generation":
        _fill_generation(span, raw, context)
        if span.failed and not span.output:
            context.notes.drop("generations that failed")
            return None
    return span


def _fill_generation(span: Span, raw: dict[str, Any], context: ImportContext) -> None:
    given, made = parsed_text(raw.get("input")), parsed_text(raw.get("output"))
    usage = parsed_text(_of(raw, "usage_details")) or raw.get("usage")
    if isinstance(usage, dict):
        counts = {name: value for name, value in usage.items() if isinstance(value, int | str)}
        span.input, span.output = _sum(counts, "input"), _sum(counts, "output")
        span.cached = _sum(counts, "cached") if span.input is not None else None
    model = raw.get("model") or _of(raw, "provided_model_name")
    show(span, given, made, context, prompt=prompt_hash(given), model=model)


def _sum(counts: Mapping[str, Any], side: str) -> int | None:
    """Tokens of one side; each kind of token is a count of its own. None where nothing is."""
    names = [name for name in counts if _is_of(name, side)]
    names = names or [name for name in counts if name.startswith(_EARLIER.get(side, side))]
    found = [
        converted(whole(v), Tokens)
        for v in (counts[name] for name in names if not name.lower().endswith("cost"))
    ]
    return sum(found) if any(found) else None


def _is_of(name: str, side: str) -> bool:
    if side == "cached":
        return "cached" in name or "cache_read" in name
    return name.startswith(side) or f"_{side}_" in name


LANGFUSE: Final = SpanFormat(
    assumes=(
        "observations of types other than GENERATION, TOOL, RETRIEVER and AGENT are left out but "
        "for what is within them; scores are not in these exports",
        *ASSUMES,
    ),
    recognises=_recognises,
    nested=_NESTED,
    read=_span,
    within=_unnested,
)
"""Observations, by trace and session."""
