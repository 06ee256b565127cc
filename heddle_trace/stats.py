"""Statistics of a trace: lengths, tails, tool latencies, spread inside groups, gaps.

Percentiles interpolate linearly. Nulls are left out, never counted as 0: a trajectory with an
unknown output length has no total.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from heddle_trace.columns import NONE, Floats, TraceColumn, carried, sums
from heddle_trace.complete import USER, open_gaps
from heddle_trace.schema import Trace, TrajectoryRecord
from heddle_trace.table import Records


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
    reward: Spread
    reward_s: Spread
    env_start_s: Spread
    rl_steps: tuple[int, int] | None
    """First and last step of training that a trajectory was recorded in."""


def describe(trace: Trace) -> TraceStats:
    """The statistics of a trace, defined as in docs/traces.md."""
    records = Records.of(trace.records)
    tool = records.step("tool")
    waits, added, ok = (records.step(name) for name in ("tool_s", "tool_tokens", "tool_ok"))
    made, prompts = records.step("output_tokens"), records.trajectory("prompt_tokens")
    called = tool.values >= 0
    people = called & (tool.values == (tool.words.index(USER) if USER in tool.words else NONE))
    steps = records.counts
    output, lengths = spread(output_totals(records)), spread(steps)
    trained = records.trajectory("step").recorded()
    return TraceStats(
        name=trace.name,
        sha256=trace.sha256,
        workloads=tuple(records.trajectory("workload").occurring()),
        trajectories=len(records),
        truncated=int((records.trajectory("truncated").values == 1).sum()),
        total_steps=int(steps.sum()),
        total_output_tokens=int(made.values[made.known].sum()),
        groups=group_stats(records),
        steps=lengths,
        steps_max_over_median=_over_median(lengths, lengths.max),
        output_tokens=output,
        output_max_over_median=_over_median(output, output.max),
        output_p99_over_median=_over_median(output, output.p99),
        output_tokens_per_step=spread(made.recorded()),
        prompt_tokens=spread(prompts.recorded()),
        tool_tokens=spread(added.of(called).recorded()),
        tool_s=spread(waits.of(called & ~people).recorded()),
        user_s=spread(waits.of(people).recorded()),
        tool_s_per_trajectory=spread(_waited(records, waits)),
        tool_ok_share=_share(ok.of(called)),
        tools=_tools(tool, waits, added, ok),
        max_context_tokens=_max_context(records),
        gaps=open_gaps(trace),
        reward=spread(records.trajectory("reward").recorded()),
        reward_s=spread(records.trajectory("reward_s").recorded()),
        env_start_s=spread(records.trajectory("env_start_s").recorded()),
        rl_steps=(int(trained.min()), int(trained.max())) if len(trained) else None,
    )


def spread(values: Iterable[float | None]) -> Spread:
    """Mean and percentiles of what is neither None nor NaN."""
    found = values if isinstance(values, np.ndarray) else np.array(list(values), dtype=float)
    known = found[~np.isnan(found)].astype(float)
    if not known.size:
        return Spread(n=0, mean=None, p50=None, p90=None, p99=None, max=None)
    p50, p90, p99 = (float(p) for p in np.percentile(known, [50, 90, 99]))
    return Spread(
        n=known.size, mean=float(known.mean()), p50=p50, p90=p90, p99=p99, max=float(known.max())
    )


def _over_median(values: Spread, value: float | None) -> float | None:
    return (value or 0.0) / values.p50 if values.p50 else None


def output_totals(records: Records) -> Floats:
    """Output tokens of each trajectory; NaN where a part of them is not recorded."""
    made = records.step("output_tokens")
    start = records.first
    stop = start + records.counts
    whole = sums(made.known, start, stop) == records.counts
    return np.where(whole, sums(made.values, start, stop), np.nan)


def group_stats(trajectories: Sequence[TrajectoryRecord]) -> GroupStats:
    """Sizes of groups, and how the variance of total output tokens splits between and within."""
    records = Records.of(trajectories)
    totals = output_totals(records)
    members = list(records.trajectory("group_id").occurring().values())
    sizes = [len(own) for own in members]
    known = [own[~np.isnan(own)] for own in (totals[own] for own in members)]
    repeated = [group for group in known if len(group) > 1]
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


def _tools(
    tool: TraceColumn, waits: TraceColumn, added: TraceColumn, ok: TraceColumn
) -> tuple[ToolStats, ...]:
    """Per tool, most called first."""
    return tuple(
        ToolStats(
            tool=name,
            calls=len(own),
            missing=int((~waits.of(own).known).sum()),
            tool_s=spread(waits.of(own).recorded()),
            tool_tokens=spread(added.of(own).recorded()),
            ok_share=_share(ok.of(own)),
        )
        for name, own in sorted(tool.occurring().items(), key=lambda item: (-len(item[1]), item[0]))
    )


def _waited(records: Records, waits: TraceColumn) -> Floats:
    """Recorded seconds away from the engine of each trajectory that has any."""
    known, count = waits.known, records.counts
    owner = np.repeat(np.arange(len(count)), count)[known]
    total = np.bincount(owner, weights=waits.values[known], minlength=len(count))
    return np.asarray(total[np.bincount(owner, minlength=len(count)) > 0], np.float64)


def _share(flags: TraceColumn) -> float | None:
    known = flags.recorded()
    return int((known == 1).sum()) / len(known) if len(known) else None


def _max_context(records: Records) -> int:
    prompts, measured, made, added = (
        column.ints
        for column in (
            records.trajectory("prompt_tokens"),
            records.step("input_tokens"),
            records.step("output_tokens"),
            records.step("tool_tokens"),
        )
    )
    first = records.first
    known = measured >= 0
    base = np.where(known, measured, 0)
    base[first] = np.where(known[first], measured[first], np.maximum(prompts, 0))
    known[first] = True
    output = np.maximum(made, 0)
    return int((carried(known, base, output + np.maximum(added, 0)) + output).max())
