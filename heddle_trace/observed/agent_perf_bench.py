"""AgentPerfBench: results of its runner, by request, or the row of the summary of a run.

Source: booth-algo/AgentPerfBench, `benchmarking/inference/src/benchmark/runner.py`
(`save_results`: `config`, `summary` and `per_request`, milliseconds from the start of the run) and
`metrics.py`; the data set agent-perf-bench/AgentPerfBench has the columns of `summary`. The time
to the first token has the wait in the engine in it.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import msgspec

from heddle_trace.importers.generations import identifier
from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.objects import objects
from heddle_trace.importers.sources import SourceFile, converted
from heddle_trace.limits import RlStep, Tokens
from heddle_trace.observed.core import Observations, ObservedFormat, ParsedObservation
from heddle_trace.observed.schema import Observation, ObservedEngine, ObservedRequest

_RESULT: Final = ("config", "summary", "per_request")
_ROW: Final = ("duration_s", "num_requests", "mean_ttft_ms", "mean_e2el_ms")
_Ms = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class _Request(msgspec.Struct):
    success: bool
    ttft_ms: _Ms | None = None
    e2el_ms: _Ms | None = None
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    session_id: int | str | None = None
    step: RlStep | None = msgspec.field(default=None, name="turn_index")
    dispatch_started_at_ms: _Ms | None = None
    client_queue_wait_ms: _Ms = 0.0


class _Summary(msgspec.Struct):
    duration_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    num_requests: Annotated[int, msgspec.Meta(ge=1, le=10**9)]
    mean_ttft_ms: _Ms
    mean_e2el_ms: _Ms
    engine: str | None = None


class AgentPerfBench(ObservedFormat):
    """A trajectory is a session; a summary is one engine with the mean of its requests."""

    one_file = True

    def recognises(self, head: Head) -> bool:
        """A result of the runner, or rows of a summary."""
        row = head.item() or (head.document if isinstance(head.document, dict) else {})
        return head.has(*_RESULT) or all(key in row for key in _ROW)

    def observations(self, sources: Sequence[SourceFile], notes: Notes) -> Observations:
        """A request each, or two samples of the engine."""
        if sources[0].first("per_request.item", dict[str, Any]) is not None:
            rows = sources[0].items(notes, "per_request.item", _Request)
            for number, (where, row) in enumerate(rows):
                with notes.guard(where):
                    yield from (ParsedObservation(where, r) for r in _request(row, number, notes))
            return
        for number, (where, raw) in enumerate(objects(sources[0], notes)):
            with notes.guard(where):
                if number:
                    raise DamagedError("is a second run: keep the row of one")
                summary = converted(raw, _Summary)
                yield from (ParsedObservation(where, each) for each in _engine(summary))


def _request(row: _Request, number: int, notes: Notes) -> Iterator[ObservedRequest]:
    if not row.success or row.ttft_ms is None or row.e2el_ms is None:
        notes.drop("requests that failed or were not timed")
        return
    if row.dispatch_started_at_ms is None:
        raise DamagedError("has no dispatch_started_at_ms: only durations, on no clock")
    notes.assume("requests whose wait in the engine counts as prefill")
    yield ObservedRequest(
        trajectory_id=identifier(f"{number if row.session_id is None else row.session_id}"),
        step=row.step or 0,
        start_s=row.dispatch_started_at_ms / 1e3,
        queue_s=row.client_queue_wait_ms / 1e3 or None,
        prefill_s=row.ttft_ms / 1e3,
        decode_s=max(0.0, row.e2el_ms - row.ttft_ms) / 1e3,
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
    )


def _engine(row: _Summary) -> Iterator[Observation]:
    """Its mean batch, by Little's law, and the sums of its requests."""
    first_s, all_s = (m / 1e3 * row.num_requests for m in (row.mean_ttft_ms, row.mean_e2el_ms))
    name, batch = identifier(row.engine or "engine"), all_s / row.duration_s
    yield ObservedEngine(engine=name, time_s=0.0, running=batch, waiting=0.0)
    took = {"prefill_s": first_s, "decode_s": max(0.0, all_s - first_s)}
    yield ObservedEngine(engine=name, time_s=row.duration_s, running=0.0, waiting=0.0, **took)
