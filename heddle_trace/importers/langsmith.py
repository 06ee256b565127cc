"""Exports of LangSmith: runs of traces.

Source: https://docs.langchain.com/langsmith/run-data-format, and the SDK's reference of a run. Read
are JSON lines, arrays, `runs` of an answer of the API, and runs with `child_runs`. `session_id` of
a run is the project; the session of a conversation is in the metadata.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from heddle_trace.importers.clocks import seconds
from heddle_trace.importers.generations import UNNAMED
from heddle_trace.importers.notes import DamagedError
from heddle_trace.importers.objects import head_objects
from heddle_trace.importers.protocol import ImportContext
from heddle_trace.importers.sources import SourceFile, converted
from heddle_trace.importers.span_fields import id_in, named_in, prompt_hash
from heddle_trace.importers.spans import ASSUMES, Span, SpanFormat, SpanKind, show, started
from heddle_trace.limits import Tokens

_NESTED: Final = {"runs": "runs.item"}
_KINDS: Final[Mapping[str, SpanKind]] = {"llm": "generation", "tool": "tool", "retriever": "tool"}
_DEEPEST: Final = 200


def _is_run(raw: dict[str, Any]) -> bool:
    return isinstance(raw.get("run_type"), str) and ("id" in raw or "dotted_order" in raw)


def _flat(raw: dict[str, Any], depth: int = 0) -> Iterator[dict[str, Any]]:
    """A run and the runs within it."""
    yield raw
    children = raw.get("child_runs")
    for child in children if isinstance(children, list) and depth < _DEEPEST else ():
        if isinstance(child, dict):
            yield from _flat(
                {"trace_id": _trace(raw), "parent_run_id": raw.get("id"), **child}, depth + 1
            )


def _trace(raw: dict[str, Any]) -> str:
    """The trace of a run: its own field, else the first part of its order, else itself."""
    if isinstance(raw.get("trace_id"), str):
        return str(raw["trace_id"])
    order = str(raw.get("dotted_order") or "").partition(".")[0]
    return order.partition("Z")[2] or str(raw.get("id"))


def _span(
    raw: dict[str, Any], where: str, source: SourceFile, context: ImportContext
) -> Span | None:
    if not _is_run(raw):
        raise DamagedError("is no run: `id` and `run_type` are expected; export the runs of traces")
    kind = _KINDS.get(raw["run_type"], "other")
    name = str(raw.get("name") or UNNAMED)
    extra = raw.get("extra")
    metadata = extra.get("metadata") if isinstance(extra, dict) else None
    session, group = named_in([metadata, raw.get("metadata")])
    example = raw.get("reference_example_id")
    parents = raw.get("parent_run_ids")
    above = parents if isinstance(parents, list) and parents else [None]
    parent = raw.get("parent_run_id") or above[-1]
    span = Span(
        where=where,
        file=source.path.name,
        trace=_trace(raw),
        id=id_in(raw.get("id"), "id") or where,
        parent=id_in(parent, "parent_run_id"),
        kind=kind,
        name=name,
        start_s=started(name, seconds(raw.get("start_time"))),
        end_s=seconds(raw.get("end_time")),
        failed=raw.get("error") is not None or raw.get("status") == "error",
        session=session,
        group=str(example) if example else group,
    )
    if kind == "generation":
        _fill_generation(span, raw, metadata, context)
        if span.failed and not span.output:
            context.notes.drop("generations that failed")
            return None
    return span


def _fill_generation(
    span: Span, raw: dict[str, Any], metadata: Any, context: ImportContext
) -> None:
    given, made = raw.get("inputs"), raw.get("outputs")
    usage = _usage(raw, metadata)
    span.input = _count(usage, "prompt_tokens", "input_tokens")
    span.output = _count(usage, "completion_tokens", "output_tokens")
    details = usage.get("prompt_token_details") or usage.get("input_token_details")
    span.cached = _count(details, "cache_read") if isinstance(details, dict) else None
    model = metadata.get("ls_model_name") if isinstance(metadata, dict) else None
    show(span, given or None, made or None, context, prompt=prompt_hash(given), model=model)


def _usage(raw: dict[str, Any], metadata: Any) -> dict[str, Any]:
    """The place that has the counts; the run itself in answers of the API."""
    outputs = raw.get("outputs")
    places: list[Any] = [raw]
    for holder in (outputs, metadata):
        if isinstance(holder, dict):
            places.append(holder.get("usage_metadata"))
            llm_output = holder.get("llm_output")
            if isinstance(llm_output, dict):
                places.append(llm_output.get("token_usage"))
    counts = ("completion_tokens", "output_tokens")
    for place in places:
        if isinstance(place, dict) and any(place.get(key) for key in counts):
            return place
    return {}


def _count(usage: dict[str, Any], *names: str) -> int | None:
    found = next((usage[name] for name in names if usage.get(name) is not None), None)
    return None if found is None else converted(found, Tokens)


LANGSMITH: Final = SpanFormat(
    assumes=(
        "runs of other types than llm, tool and retriever are left out but for what is within "
        "them: agents that a chain calls one after the other are one trajectory",
        *ASSUMES,
    ),
    recognises=lambda head: any(_is_run(raw) for raw in head_objects(head, _NESTED)),
    nested=_NESTED,
    read=_span,
    within=_flat,
)
"""Runs, by trace and thread."""
