"""Statistics of a trace: lengths, tails, tool latencies, spread inside groups, gaps.

Percentiles interpolate linearly. Nulls are left out, never counted as 0: a trajectory with an
unknown output length has no total.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from heddle_trace.complete import USER, open_gaps
from heddle_trace.schema import Trace, TrajectoryRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of `n` recorded values; all None when nothing is recorded."""

    n: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolStats:
    """One tool (parallel calls joined with "+" count as one). `missing` calls have no `tool_s`."""

    tool: str
    calls: int
    missing: int
    tool_s: Spread
    tool_tokens: Spread
    ok_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """Groups of samples of one prompt; variances of total output tokens over groups of 2 or more.

    `within_share` is the part of the variance that is left inside a group: low means that the
    prompt decides the length. Population variances: few samples a group understate it.
    """

    groups: int
    size_min: int
    size_p50: float
    size_max: int
    within_variance: float | None
    between_variance: float | None
    within_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStats:
    """Result of `describe`. Tokens and seconds; `tool_s` leaves out turns of people ("user").

    `tool_s_per_trajectory` sums every recorded wait, people's included: the time a trajectory
    spends away from its engine. `total_output_tokens` is the sum of what is recorded.
    `gaps` counts per field the values that `complete` needs a rule for. `max_context_tokens` is the
    largest context after a generation, a lower bound when there are gaps in token counts.
    """

    name: str
    sha256: str
    workloads: tuple[str, ...]
    trajectories: int
    truncated: int
    total_steps: int
    total_output_tokens: int
    groups: GroupStats
    steps: Spread
    steps_max_over_median: float | None
    output_tokens: Spread
    output_max_over_median: float | None
    output_p99_over_median: float | None
    output_tokens_per_step: Spread
    prompt_tokens: Spread
    tool_tokens: Spread
    tool_s: Spread
    user_s: Spread
    tool_s_per_trajectory: Spread
    tool_ok_share: float | None
    tools: tuple[ToolStats, ...]
    max_context_tokens: int
    gaps: dict[str, int]


def describe(trace: Trace) -> TraceStats:
    """The statistics of a trace, defined as in docs/trace-format.md."""
    records = trace.records
    steps = [step for record in records for step in record.steps]
    called = [step for step in steps if step.tool is not None]
    output = spread(output_total(record) for record in records)
    lengths = spread(len(record.steps) for record in records)
    return TraceStats(
        name=trace.name,
        sha256=trace.sha256,
        workloads=tuple(dict.fromkeys(record.workload for record in records)),
        trajectories=len(records),
        truncated=sum(bool(record.truncated) for record in records),
        total_steps=len(steps),
        total_output_tokens=sum(step.output_tokens or 0 for step in steps),
        groups=group_stats(records),
        steps=lengths,
        steps_max_over_median=_over_median(lengths, lengths.max),
        output_tokens=output,
        output_max_over_median=_over_median(output, output.max),
        output_p99_over_median=_over_median(output, output.p99),
        output_tokens_per_step=spread(step.output_tokens for step in steps),
        prompt_tokens=spread(record.prompt_tokens for record in records),
        tool_tokens=spread(step.tool_tokens for step in called),
        tool_s=spread(step.tool_s for step in called if step.tool != USER),
        user_s=spread(step.tool_s for step in called if step.tool == USER),
        tool_s_per_trajectory=spread(_waited(record) for record in records),
        tool_ok_share=_share(step.tool_ok for step in called),
        tools=_tools(records),
        max_context_tokens=max(_max_context(record) for record in records),
        gaps=open_gaps(trace),
    )


def spread(values: Iterable[float | None]) -> Spread:
    """Mean and percentiles of what is not None."""
    known = np.array([value for value in values if value is not None], dtype=float)
    if not known.size:
        return Spread(n=0, mean=None, p50=None, p90=None, p99=None, max=None)
    p50, p90, p99 = (float(p) for p in np.percentile(known, [50, 90, 99]))
    return Spread(
        n=known.size, mean=float(known.mean()), p50=p50, p90=p90, p99=p99, max=float(known.max())
    )


def _over_median(values: Spread, value: float | None) -> float | None:
    return (value or 0.0) / values.p50 if values.p50 else None


def output_total(record: TrajectoryRecord) -> int | None:
    """Output tokens of a trajectory; None when a part of it is not recorded."""
    total = 0
    for step in record.steps:
        if step.output_tokens is None:
            return None
        total += step.output_tokens
    return total


def group_stats(records: Sequence[TrajectoryRecord]) -> GroupStats:
    """Sizes of groups, and how the variance of total output tokens splits between and within."""
    members: dict[str, list[int | None]] = {}
    for record in records:
        members.setdefault(record.group_id, []).append(output_total(record))
    sizes = [len(group) for group in members.values()]
    known = [[total for total in group if total is not None] for group in members.values()]
    repeated = [np.array(group, dtype=float) for group in known if len(group) > 1]
    within = between = share = None
    if repeated:
        n = sum(group.size for group in repeated)
        grand = sum(float(group.sum()) for group in repeated) / n
        within = sum(float(group.var()) * group.size for group in repeated) / n
        between = sum(group.size * float(group.mean() - grand) ** 2 for group in repeated) / n
        share = within / (within + between) if within + between else None
    return GroupStats(
        groups=len(members),
        size_min=min(sizes),
        size_p50=float(np.median(sizes)),
        size_max=max(sizes),
        within_variance=within,
        between_variance=between,
        within_share=share,
    )


def _tools(records: Sequence[TrajectoryRecord]) -> tuple[ToolStats, ...]:
    """Per tool, most called first."""
    calls: dict[str, list[tuple[float | None, int | None, bool | None]]] = {}
    for record in records:
        for step in record.steps:
            if step.tool is not None:
                call = (step.tool_s, step.tool_tokens, step.tool_ok)
                calls.setdefault(step.tool, []).append(call)
    return tuple(
        ToolStats(
            tool=tool,
            calls=len(rows),
            missing=sum(row[0] is None for row in rows),
            tool_s=spread(row[0] for row in rows),
            tool_tokens=spread(row[1] for row in rows),
            ok_share=_share(row[2] for row in rows),
        )
        for tool, rows in sorted(calls.items(), key=lambda item: (-len(item[1]), item[0]))
    )


def _waited(record: TrajectoryRecord) -> float | None:
    waits = [step.tool_s for step in record.steps if step.tool_s is not None]
    return sum(waits) if waits else None


def _share(flags: Iterable[bool | None]) -> float | None:
    known = [flag for flag in flags if flag is not None]
    return sum(known) / len(known) if known else None


def _max_context(record: TrajectoryRecord) -> int:
    largest = 0
    context = record.prompt_tokens or 0
    for step in record.steps:
        if step.input_tokens is not None:
            context = step.input_tokens
        context += step.output_tokens or 0
        largest = max(largest, context)
        context += step.tool_tokens or 0
    return largest
