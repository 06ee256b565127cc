"""Spans of tracers, one object each, put together to trajectories.

A trace holds spans of generations, tools and agents, each within its parent. Generations of one
agent, in the order of their starts, are a trajectory; so are those within a tool or a second agent.
The traces of a session are one trajectory, with words of a person between them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import msgspec

from heddle_trace.complete import USER
from heddle_trace.importers.generations import (
    UNNAMED,
    LoggedGeneration,
    derive_added,
    identifier,
    steps_of,
)
from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.objects import objects
from heddle_trace.importers.protocol import ImportContext, ParsedRecord, Records
from heddle_trace.importers.sessions import Sessions
from heddle_trace.importers.sources import SourceFile
from heddle_trace.importers.span_fields import calls_in, tokens_in
from heddle_trace.schema import TrajectoryRecord

SpanKind: TypeAlias = Literal["generation", "tool", "agent", "other"]

ASSUMES: Final = (
    "generations within one agent are a trajectory in the order of their starts; those within a "
    "tool, or within an agent of another agent, are a trajectory of its own, and so are those that "
    "overlap in time",
    "a wait ends with the last tool that began after the generation, and holds the generations "
    "within that tool; else it ends with the next generation, and what ran is 'unspecified'",
    "between traces of one session a person spoke, unless the prompt became shorter or they "
    "overlap in time: then each is a trajectory",
    "traces without a group or task id are a group where their first generation has the same "
    "input, and by themselves where the log lacks it",
)
"""Of every format of spans."""

_APART_S: Final = 1e-3
"""Clocks of a tracer are one clock; less than this is rounding."""


class Span(msgspec.Struct, array_like=True):
    """One span, without its text. Times in Unix seconds; `calls` are the tools that it asked for.

    `prompt` is a hash of the input of a generation, None where it is not recorded. `trace` is the
    trace that it belongs to, `parent` the span that it is within.
    """

    where: str
    file: str
    trace: str
    id: str
    parent: str | None
    kind: SpanKind
    name: str
    start_s: float
    end_s: float | None
    failed: bool | None = None
    output: int | None = None
    input: int | None = None
    cached: int | None = None
    calls: tuple[str, ...] = ()
    prompt: str | None = None
    model: str | None = None
    session: str | None = None
    group: str | None = None


class _Run(msgspec.Struct, array_like=True):
    """Generations of one agent in one trace, in order."""

    where: str
    file: str
    name: str
    group: str
    parent: str | None
    model: str | None
    start_s: float
    end_s: float
    generations: list[LoggedGeneration]


ReadSpan: TypeAlias = Callable[[dict[str, Any], str, SourceFile, ImportContext], Span | None]
"""Makes a span of a logged object; None for one that is left out. Raises DamagedError."""


def started(name: str, start_s: float | None) -> float:
    """The start of a span. Raises DamagedError, with the remedy, for a span without times."""
    if start_s is None:
        raise DamagedError(
            f"span {name[:60]!r} has no times, and without them neither the order of generations "
            "nor the waits between them are known: export the spans with their start and end times"
        )
    return start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanFormat:
    """The spans of one tracer; implements `Importer`.

    `nested` is that of `objects`; `within` has the spans of each such object.
    """

    assumes: tuple[str, ...]
    recognises: Callable[[Head], bool]
    nested: Mapping[str, str]
    read: ReadSpan
    within: Callable[[dict[str, Any]], Iterable[dict[str, Any]]] = lambda raw: (raw,)

    def records(self, sources: Sequence[SourceFile], context: ImportContext) -> Records:
        """One record an agent of a trace, or a session of traces.

        Memory holds the spans of one trace, or the runs of one session.
        """
        with Sessions(Span) as traces, Sessions(_Run) as sessions:
            for source in sources:
                for where, raw in objects(source, context.notes, self.nested):
                    for each in self.within(raw):
                        with context.notes.guard(where):
                            span = self.read(each, where, source, context)
                            if span is not None:
                                traces.add(span.trace, span)
            for _, spans in traces:
                with context.notes.guard(spans[0].where):
                    for key, run in _TraceOfSpans(spans, context.notes).runs():
                        sessions.add(key, run)
            for key, runs in sessions:
                for name, parts in _continued(key, sorted(runs, key=lambda run: run.start_s)):
                    with context.notes.guard(parts[0].where):
                        yield ParsedRecord(parts[0].where, _record(name, parts, context))


def show(
    span: Span, given: Any, made: Any, context: ImportContext, *, prompt: str | None, model: Any
) -> None:
    """Fill in what the input and the output of a generation show; recorded counts stay."""
    if span.input is None and given is not None:
        span.input = tokens_in(given, context.tokens)
    if span.output is None and made is not None:
        span.output = tokens_in(made, context.tokens)
    span.calls, span.prompt = tuple(calls_in(made)), prompt
    span.model = str(model) if model else None


@dataclass(slots=True)
class _Lane:
    """Generations that do not overlap, and the tools that ran after each."""

    generations: list[Span]
    tools: list[list[Span]] = field(default_factory=lambda: [[]])


class _TraceOfSpans:
    """The spans of one trace, by agent."""

    def __init__(self, spans: Sequence[Span], notes: Notes) -> None:
        self._spans = sorted(spans, key=lambda span: span.start_s)
        self._by_id = {span.id: span for span in self._spans}
        self._notes = notes
        self._trace = self._spans[0].trace
        self._session = next((s.session for s in self._spans if s.session), None)
        self._group = next((s.group for s in self._spans if s.group), None)

    def runs(self) -> Iterator[tuple[str, _Run]]:
        """The runs of the agents of this trace, each with the trajectory that it is a part of."""
        lanes = self._lanes()
        if not lanes:
            self._notes.drop("traces without a generation")
            return
        first = lanes[next(iter(lanes))][0].generations[0]
        prompt = f"prompt-{first.prompt}" if first.prompt else identifier(self._trace)
        group = identifier(self._group) if self._group else prompt
        main = identifier(self._session or self._trace)
        for owner, own in lanes.items():
            for number, lane in enumerate(own):
                if owner is None and number == 0:
                    yield main, self._run(lane, main, group, None)
                    continue
                agent = "parallel" if owner is None else self._by_id[owner].name
                at = f"{self._trace}/{owner or agent}" + (f"-{number}" if number else "")
                yield (
                    identifier(at),
                    self._run(
                        lane,
                        identifier(at),
                        identifier(f"{group}/{agent}"),
                        main if None in lanes else None,
                    ),
                )
            if len(own) > 1:
                self._notes.assume(
                    "generations that overlap others of their agent: trajectories of their own",
                    sum(len(lane.generations) for lane in own[1:]),
                )

    def _lanes(self) -> dict[str | None, list[_Lane]]:
        """The generations of each agent; None is the first one."""
        lanes: dict[str | None, list[_Lane]] = {}
        for span in self._spans:
            if span.kind == "generation":
                self._place(span, lanes)
            elif span.kind == "tool":
                self._attach(span, lanes.get(self._owner(span), ()))
        return lanes

    def _place(self, span: Span, lanes: dict[str | None, list[_Lane]]) -> None:
        if any(above.kind == "generation" for above in self._above(span)):
            self._notes.drop("generations within a generation, recorded twice")
            return
        if span.end_s is None:
            self._notes.drop("generations that had not ended")
            return
        own = lanes.setdefault(self._owner(span), [])
        free = [lane for lane in own if _end(lane) <= span.start_s + _APART_S]
        if free:
            lane = max(free, key=_end)
            lane.generations.append(span)
            lane.tools.append([])
        else:
            own.append(_Lane([span]))

    def _attach(self, tool: Span, lanes: Sequence[_Lane]) -> None:
        """Put a tool after the generation that ended last before it began, or that streams it."""
        ended = [lane for lane in lanes if _end(lane) <= tool.start_s + _APART_S]
        if lanes:
            max(ended or lanes, key=_end).tools[-1].append(tool)
        else:
            self._notes.drop("tools that no generation of their agent was before")

    def _above(self, span: Span) -> Iterator[Span]:
        """The spans that one is within, innermost first."""
        seen = {span.id}
        at = span.parent
        while at is not None and at not in seen and at in self._by_id:
            seen.add(at)
            yield self._by_id[at]
            at = self._by_id[at].parent

    def _owner(self, span: Span) -> str | None:
        """The tool or agent within which a span is, but for the outermost agent."""
        within = [above for above in self._above(span) if above.kind in ("agent", "tool")]
        if within and within[-1].kind == "agent":
            within.pop()
        return within[0].id if within else None

    def _run(self, lane: _Lane, name: str, group: str, parent: str | None) -> _Run:
        spans = lane.generations
        after: list[Span | None] = [*spans[1:], None]
        return _Run(
            where=spans[0].where,
            file=spans[0].file,
            name=f"{name}/{identifier(self._trace)}",
            group=group,
            parent=parent,
            model=spans[0].model,
            start_s=spans[0].start_s,
            end_s=_end(lane),
            generations=[
                _generation(span, tools, following)
                for span, tools, following in zip(spans, lane.tools, after, strict=True)
            ],
        )


def _end(lane: _Lane) -> float:
    last = lane.generations[-1]
    return last.start_s if last.end_s is None else last.end_s


def _generation(span: Span, tools: Sequence[Span], following: Span | None) -> LoggedGeneration:
    g = LoggedGeneration(
        output=span.output,
        input=span.input,
        cached=span.cached,
        start_s=span.start_s,
        end_s=span.end_s,
    )
    ends = [tool.end_s for tool in tools]
    known = [end for end in ends if end is not None]
    next_s = None if following is None else following.start_s
    if tools:
        g.tools = tuple(tool.name for tool in tools)
        failed = [tool.failed for tool in tools if tool.failed is not None]
        g.ok = not any(failed) if failed else None
        last = max(known) if len(known) == len(ends) else next_s
        g.until_s = last if last is None or next_s is None else min(last, next_s)
    elif following is not None and (span.calls or following.start_s > (span.end_s or 0) + _APART_S):
        g.tools, g.until_s = span.calls or (UNNAMED,), next_s
    return g


def _continued(key: str, runs: Sequence[_Run]) -> Iterator[tuple[str, list[_Run]]]:
    """The trajectories of a session: runs that follow one another, with prompts that grow."""
    trajectories: list[list[_Run]] = []
    for run in runs:
        before = trajectories[-1][-1] if trajectories else None
        if before is not None and _follows(before, run):
            trajectories[-1].append(run)
        else:
            trajectories.append([run])
    for number, parts in enumerate(trajectories):
        yield key if number == 0 else identifier(parts[0].name), parts


def _follows(before: _Run, run: _Run) -> bool:
    if run.start_s < before.end_s - _APART_S:
        return False
    last, first = before.generations[-1].input, run.generations[0].input
    return last is None or first is None or first >= last


def _record(name: str, parts: Sequence[_Run], context: ImportContext) -> TrajectoryRecord:
    generations: list[LoggedGeneration] = []
    for run in parts:
        if generations:
            last = generations[-1]
            last.tools, last.until_s, last.ok = (USER,), run.start_s, None
        generations += run.generations
    derive_added(generations)
    first = parts[0]
    return TrajectoryRecord(
        trajectory_id=name,
        group_id=first.group,
        workload=context.workload_or("agent"),
        prompt_tokens=generations[0].input,
        steps=steps_of(generations, context.notes),
        source=first.file,
        model=first.model,
        parent_id=first.parent,
    )
