"""Target statistics of the synthetic workloads; recorded traces are measured alike.

The ranges hold for a rollout of 6,400 trajectories in groups of 16, whatever the seed. Each names
its source; a range is wide enough for what a seed moves. docs/traces.md shows both sides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from heddle_trace.columns import NONE, Ints, sums
from heddle_trace.complete import USER
from heddle_trace.errors import TraceError
from heddle_trace.schema import TrajectoryRecord
from heddle_trace.stats import group_stats, output_totals, spread
from heddle_trace.table import Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A statistic of `measured` and the range it must fall into, with the reason for that range."""

    low: float
    high: float
    reason: str


def _common(tool_s: float) -> dict[str, Target]:
    return {
        "tool_s_mean": Target(
            low=tool_s * 0.93, high=tool_s * 1.07, reason="Heddle, Table 1, 14B: mean tool seconds"
        ),
        "output_max_over_median": Target(
            low=4.0, high=35.0, reason="Heddle: slowest takes above 4x the median; recorded 5-19"
        ),
        "first_output_correlation": Target(
            low=-0.3, high=0.2, reason="one policy or one session: -0.4 to 0.1 recorded"
        ),
    }


TARGETS: Final[Mapping[str, Mapping[str, Target]]] = {
    "coding": {
        **_common(0.41),
        "output_mean": Target(
            low=3_500, high=5_000, reason="tbench 4,337; 6,400 of them exceed 20 million tokens"
        ),
        "output_p99_over_median": Target(
            low=4.5, high=10.0, reason="tbench 4.9, cc_weka 7.8; the limit is 14x the median"
        ),
        "steps_mean": Target(
            low=6.0, high=9.0, reason="contest tasks; tau2 5.8, tbench (harder tasks) 19"
        ),
        "steps_output_correlation": Target(
            low=0.74, high=0.90, reason="tbench 0.70 (0.84 in logs), tau_airline 0.81, cc_weka 0.89"
        ),
        "within_share": Target(
            low=0.35, high=0.50, reason="tbench 0.34 at 4 samples a group, which is 0.42 at 16"
        ),
        "tool_ok_share": Target(low=0.79, high=0.88, reason="tbench 0.845"),
        "truncated_share": Target(
            low=0.0005, high=0.01, reason="Heddle limits outputs to 40K: a few must reach it"
        ),
        "group_correlation": Target(
            low=0.55, high=0.80, reason="tbench 0.78, tau2 0.71, tau_airline 0.75, hotpotqa 0.49"
        ),
        "seen_correlation": Target(
            low=0.25, high=0.50, reason="tbench 0.30, tau2 0.29, MINT 0.45; Libra: payload"
        ),
    },
    "search": {
        **_common(1.41),
        "output_mean": Target(
            low=1_200, high=1_800, reason="Heddle calls search short; below half of coding"
        ),
        "output_p99_over_median": Target(low=3.5, high=6.5, reason="hotpotqa 4.2"),
        "steps_mean": Target(low=9.0, high=12.0, reason="Heddle: many steps; above coding's"),
        "steps_output_correlation": Target(low=0.85, high=0.97, reason="hotpotqa 0.95"),
        "within_share": Target(
            low=0.48, high=0.66, reason="hotpotqa 0.48; 0.56 in logs, freed of group size"
        ),
        "tool_ok_share": Target(low=0.88, high=0.94, reason="hotpotqa 0.918"),
        "truncated_share": Target(low=0.0, high=0.001, reason="short: the limit is out of reach"),
        "group_correlation": Target(low=0.45, high=0.70, reason="hotpotqa 0.49, tau2 0.71"),
        "seen_correlation": Target(low=0.15, high=0.40, reason="hotpotqa 0.17, tau2 0.29"),
    },
    "math": {
        **_common(0.046),
        "output_mean": Target(
            low=5_500, high=9_500, reason="longest of the three; reasoning of thousands of tokens"
        ),
        "output_p99_over_median": Target(
            low=4.0, high=9.0, reason="MINT math 4.0 although cut at 5 steps of 512 tokens"
        ),
        "steps_mean": Target(low=2.3, high=4.0, reason="few calls; MINT math 4.0, gsm8k 3.3"),
        "steps_output_correlation": Target(
            low=0.5, high=0.8, reason="between MINT math, 0.37 with its cuts, and coding"
        ),
        "within_share": Target(
            low=0.42, high=0.62, reason="no one-policy record; between coding's and MINT's 0.81"
        ),
        "tool_ok_share": Target(
            low=0.82, high=0.95, reason="above MINT gsm8k 0.74, math 0.57, of mostly weak models"
        ),
        "truncated_share": Target(
            low=0.002, high=0.03, reason="Heddle limits outputs to 40K: a few must reach it"
        ),
        "group_correlation": Target(low=0.50, high=0.75, reason="as coding; no record of its own"),
        "seen_correlation": Target(
            low=0.4, high=0.65, reason="MINT math 0.54: with few steps, the second decides much"
        ),
    },
}


def targets(workload: str) -> Mapping[str, Target]:
    """The targets of a synthetic workload. Raises TraceError for an unknown one."""
    if workload not in TARGETS:
        raise TraceError(f"workload {workload!r} is not one of {', '.join(TARGETS)}")
    return TARGETS[workload]


def measured(trajectories: Sequence[TrajectoryRecord]) -> dict[str, float | None]:
    """The statistics of the targets; None if the records lack them.

    `group_correlation` and `seen_correlation` are those of `signals` after two steps.
    """
    records = Records.of(trajectories)
    totals = output_totals(records)
    complete = np.flatnonzero(~np.isnan(totals))
    known, totals = records.take(complete), totals[complete]
    output, count = spread(totals), records.counts
    tool, waits, ok = (records.step(name) for name in ("tool", "tool_s", "tool_ok"))
    called = tool.values >= 0
    people = tool.values == (tool.words.index(USER) if USER in tool.words else NONE)
    succeeded = ok.of(called).recorded()
    seen, group = signals(known, 2)
    return {
        "tool_s_mean": spread(waits.of(called & ~people).values).mean,
        "output_mean": output.mean,
        "output_max_over_median": _ratio(output.max, output.p50),
        "output_p99_over_median": _ratio(output.p99, output.p50),
        "steps_mean": spread(count).mean,
        "steps_output_correlation": _correlation(known.counts.astype(float), totals),
        "first_output_correlation": _correlation(
            _output(known, 0, 1, at_least=0).astype(float), totals
        ),
        "within_share": group_stats(records).within_share,
        "tool_ok_share": int((succeeded == 1).sum()) / len(succeeded) if len(succeeded) else None,
        "truncated_share": int((records.trajectory("truncated").values == 1).sum()) / len(records),
        "group_correlation": group,
        "seen_correlation": seen,
    }


def signals(
    trajectories: Sequence[TrajectoryRecord], steps: int
) -> tuple[float | None, float | None]:
    """Explained share of the log of the remaining output after `steps` steps: (seen, group).

    *Seen* is the multiple correlation with what the trajectory itself shows (log output so far, log
    of the first tool's payload, failed calls), by least squares over all; *group* the correlation
    with the mean of the other samples of its group, as a history of the prompt would know it (at
    or below 0 where groups do not matter). Of the trajectories that go on; None below 30 of them.
    """
    records = Records.of(trajectories)
    going = records.take(records.counts > steps)
    if len(going) < 30:
        return None, None
    first = going.first
    payload = going.step("tool_tokens").ints[first]
    failed = going.step("tool_ok").values == 0
    rest = np.log(_output(going, steps, None))
    shown = np.column_stack(
        [
            np.ones(len(going)),
            np.log(_output(going, 0, steps)),
            np.log1p(np.maximum(payload, 0)),
            sums(failed, first, first + steps),
        ]
    )
    weights = np.linalg.lstsq(shown, rest)[0]
    seen = _correlation(shown @ weights, rest)
    members = going.trajectory("group_id").occurring().values()
    repeated = [own for own in members if len(own) > 1]
    if not repeated:
        return seen, None
    others = [(rest[m].sum() - rest[m]) / (m.size - 1) for m in repeated]
    return seen, _correlation(np.concatenate(others), rest[np.concatenate(repeated)])


def _output(records: Records, begin: int, end: int | None, at_least: int = 1) -> Ints:
    """Tokens of some steps of each trajectory, those recorded."""
    made = np.maximum(records.step("output_tokens").ints, 0)
    count, first = records.counts, records.first
    last = first + (count if end is None else np.minimum(count, end))
    return np.maximum(sums(made, first + begin, last), at_least)


def _correlation(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float | None:
    if a.size < 2 or not a.std() or not b.std():
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None
