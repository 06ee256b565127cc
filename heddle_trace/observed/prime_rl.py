"""prime-rl's traces of rollouts, and beside them its `metrics.jsonl`; all times are Unix seconds.

Source: PrimeIntellect-ai/verifiers, `verifiers/v1/trace.py` and `episode.py` (a trace has `calls`
and `timing`; prompt tokens are without cached ones); PrimeIntellect-ai/prime-rl,
`src/prime_rl/monitors/file/monitor.py` (episodes; a row of metrics with the time of its logging),
pull request #2983 (files `all` and `effective`), and the timers of `src/prime_rl/trainer/rl/`.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from heddle_trace.importers.generations import identifier
from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import Notes
from heddle_trace.importers.sources import SourceFile
from heddle_trace.observed.core import (
    Observations,
    ObservedFormat,
    ParsedObservation,
    TimedGeneration,
    requests_of_generations,
)
from heddle_trace.observed.prime_rl_rows import PrimeRlRow, Trace
from heddle_trace.observed.schema import ObservedRequest, Phase, PhaseName

_ROWS: Final = msgspec.json.Decoder(PrimeRlRow)
_KEYS: Final = ({"calls", "timing"}, {"task", "agent", "nodes"})
"""Of a trace: the last come before a megabyte of its nodes is over."""


class PrimeRl(ObservedFormat):
    """A trajectory is a trace; from a call to the next its harness runs tools."""

    def recognises(self, head: Head) -> bool:
        """Traces, episodes of them, or rows with the time of a step."""
        if head.any_row("step", "time", "time/step"):
            return True
        inner = (row["traces"] for row in head.objects if isinstance(row.get("traces"), list))
        traces = [*head.objects, *(t for each in inner for t in each if isinstance(t, dict))]
        return any(keys <= each.keys() for each in traces for keys in _KEYS)

    def observations(self, sources: Sequence[SourceFile], notes: Notes) -> Observations:
        """Requests of traces, each trace once, and phases of the trainer."""
        seen: set[str] = set()
        for source in sources:
            for where, row in source.rows(notes, _ROWS):
                for phase in _phases(row):
                    yield ParsedObservation(where, phase)
                work = row.run.get("work")
                kind = work.get("type") if isinstance(work, dict) else None
                group = row.group.get("id", row.group_id)
                more = {"group_id": None if group is None else identifier(str(group))}
                for trace in (row,) if row.traces is None else row.traces:
                    if "eval" in (trace.kind, kind):
                        notes.drop("traces of evaluation")
                    elif trace.id in seen:
                        notes.drop("traces that are in two files")
                    elif trace.calls:
                        seen.add(trace.id)
                        with notes.guard(where):
                            for request in _requests(trace, more):
                                yield ParsedObservation(where, request)


def _phases(row: PrimeRlRow) -> Iterator[Phase]:
    """The trainer's step ends with its training; what it waited for a batch is the rollout's."""
    if row.step_s is None or row.training_s is None:
        return
    trains_s = max(row.step_s - row.training_s, 0.0)
    waits_s = max(trains_s - row.waiting_s, 0.0)
    updated_s = min(row.update_s, waits_s)
    parts: tuple[tuple[PhaseName, float, float], ...] = (
        ("step", 0.0, row.step_s),
        ("update", 0.0, updated_s),
        ("other", updated_s, min(updated_s + row.saving_s, waits_s)),
        ("rollout", waits_s, trains_s),
        ("training", trains_s, row.step_s),
    )
    begun_s = row.time - row.step_s
    for name, start_s, end_s in parts:
        if end_s > start_s:
            times = {"start_s": begun_s + start_s, "end_s": begun_s + end_s}
            yield Phase(phase=name, rl_step=row.step, **times)


def _requests(trace: Trace, more: dict[str, Any]) -> Iterator[ObservedRequest]:
    made = []
    for call in trace.calls:
        counts: dict[str, int | None] = {}
        if call.usage is not None:
            counts["output_tokens"] = call.usage.completion_tokens
            counts["cached_tokens"] = cached = call.usage.cached_input_tokens
            counts["input_tokens"] = call.usage.prompt_tokens + (cached or 0)
        if call.time.end:
            made.append(TimedGeneration(call.time.start, call.time.end, counts))
    timing = trace.timing
    return requests_of_generations(
        made, trace.id, timing.start, timing.scoring.end - timing.scoring.start, **more
    )
