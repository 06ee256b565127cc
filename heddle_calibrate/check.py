"""Stage three: measured runs beside their simulation, and the order of policies in both.

A run is simulated with the KV space, failures and search times of its own engines
(`simulation_of_run`), so that the error is that of profile and simulator together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa

from heddle_core.commands import SolvePlan
from heddle_core.events import EngineFailed, EngineReady, PlanSolved
from heddle_core.ids import EngineId, EngineShape
from heddle_core.journal import Entry
from heddle_sim.config import SimulationConfig
from heddle_sim.latency import LatencyTable

FIGURES = (
    "makespan_s",
    "completion_p50_s",
    "completion_p99_s",
    "tpot_mean_ms",
    "ttft_mean_s",
    "prefix_hit",
)
"""Keys of a summary that are compared. `prefix_hit` is a share: its error is a difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    measured: float | None
    simulated: float | None
    error_pct: float | None
    """Relative, or for a share the difference, in percent; None where there is nothing to divide
    by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One run, measured and simulated."""

    run: str
    policy: str
    seed: int
    trace: str
    kind: str
    """Trace and cluster of runs that can be ranked together."""
    figures: Mapping[str, Figure]
    finish_order: float | None
    """Spearman's rank correlation of finish times over trajectories; None for a single one."""
    late_share: float = 0.0
    """How late the run's clock was, over the makespan; above 0.05 its times are not valid."""
    other_cpu_share: float | None = None
    """What other processes took of the CPUs' time while its engines ran; None if it was not
    measured. Engines on CPUs are slower for it than the profile says."""

    def plain(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "policy": self.policy,
            "seed": self.seed,
            "trace": self.trace,
            **{name: asdict(figure) for name, figure in self.figures.items()},
            "finish_order": self.finish_order,
            "late_share": self.late_share,
            "other_cpu_share": self.other_cpu_share,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Policies on one trace and cluster, best first, by mean makespan."""

    trace: str
    measured: tuple[str, ...]
    simulated: tuple[str, ...]
    pairs: int
    """Pairs of policies whose measured makespans differ by more than a tie."""
    alike: int
    """Of these, pairs that the simulator puts in the same order."""
    spread_pct: float | None
    """The widest range of makespans of one policy over repeated runs; None without repeats."""


def simulation_of_run(entries: Iterable[Entry], of_profile: SimulationConfig) -> SimulationConfig:
    """The simulated cluster of a profile, with the KV space and failures of a run's own engines.

    A plan search takes as long as in the run.
    """
    capacity: dict[EngineShape, int] = {}
    faults: list[tuple[float, EngineId]] = []
    search_times_s: list[float] = []
    requested_s: dict[int, float] = {}
    for entry in entries:
        for command in entry.commands:
            if isinstance(command, SolvePlan):
                requested_s[command.plan] = entry.event.time_s
        match entry.event:
            case PlanSolved(time_s=time_s, plan=plan) if plan in requested_s:
                search_times_s.append(time_s - requested_s[plan])
            case EngineReady(shape=shape, kv_capacity_tokens=tokens):
                capacity.setdefault(shape, tokens)
            case EngineFailed(time_s=time_s, engine=engine):
                faults.append((time_s, engine))

    def table(shape: EngineShape) -> LatencyTable:
        found = of_profile.table(shape)
        return replace(found, kv_capacity_tokens=capacity.get(shape, found.kv_capacity_tokens))

    return replace(
        of_profile,
        table=table,
        faults=tuple(faults),
        planning_s=fmean(search_times_s) if search_times_s else None,
    )


def compare_figures(
    measured: Mapping[str, Any], simulated: Mapping[str, Any], names: Sequence[str] = FIGURES
) -> dict[str, Figure]:
    """Figures of two summaries beside each other."""
    return {name: _figure(name, measured.get(name), simulated.get(name)) for name in names}


def _figure(name: str, measured: float | None, simulated: float | None) -> Figure:
    error_pct: float | None = None
    if measured is not None and simulated is not None:
        if name == "prefix_hit":
            error_pct = (simulated - measured) * 100
        elif measured > 0:
            error_pct = (simulated / measured - 1) * 100
    return Figure(measured=measured, simulated=simulated, error_pct=error_pct)


def finish_order(measured: pa.Table, simulated: pa.Table) -> float | None:
    """Spearman's correlation over the trajectories that both finished."""
    from scipy.stats import spearmanr  # of the extra `calibrate`, which nothing else here needs

    theirs = dict(
        zip(
            simulated.column("trajectory").to_pylist(),
            simulated.column("finished_s").to_pylist(),
            strict=True,
        )
    )
    both = [
        (mine_s, theirs[name])
        for name, mine_s in zip(
            measured.column("trajectory").to_pylist(),
            measured.column("finished_s").to_pylist(),
            strict=True,
        )
        if mine_s is not None and theirs.get(name) is not None
    ]
    mine, other = np.array(both).reshape(-1, 2).T
    if len(np.unique(mine)) < 2 or len(np.unique(other)) < 2:
        return None
    return float(spearmanr(mine, other).statistic)


def rankings(checked: Sequence[Checked], *, tie_pct: float) -> list[Ranking]:
    """Rank the policies of each trace and cluster that has two or more.

    Measured makespans count as a tie if they differ by less than `tie_pct`, or by less than
    repeated runs of one policy.
    """
    groups: dict[str, list[Checked]] = {}
    for each in checked:
        groups.setdefault(each.kind, []).append(each)
    return [
        _ranking(group, tie_pct)
        for group in groups.values()
        if len(dict.fromkeys(each.policy for each in group)) > 1
    ]


def _ranking(group: Sequence[Checked], tie_pct: float) -> Ranking:
    measured: dict[str, list[float]] = {}
    simulated: dict[str, list[float]] = {}
    for each in group:
        makespan = each.figures["makespan_s"]
        measured.setdefault(each.policy, []).append(makespan.measured or 0.0)
        simulated.setdefault(each.policy, []).append(makespan.simulated or 0.0)
    ranges = [(max(s) - min(s)) / fmean(s) * 100 for s in measured.values() if len(s) > 1]
    spread_pct = max(ranges, default=None)
    mean = {policy: fmean(s) for policy, s in measured.items()}
    other = {policy: fmean(s) for policy, s in simulated.items()}
    least = 1 + max(tie_pct, spread_pct or 0.0) / 100
    distinct = [
        (a, b)
        for a, b in combinations(mean, 2)
        if max(mean[a], mean[b]) > min(mean[a], mean[b]) * least
    ]
    alike = sum((mean[a] < mean[b]) == (other[a] < other[b]) for a, b in distinct)
    return Ranking(
        trace=group[0].trace,
        measured=tuple(sorted(mean, key=lambda policy: mean[policy])),
        simulated=tuple(sorted(other, key=lambda policy: other[policy])),
        pairs=len(distinct),
        alike=alike,
        spread_pct=spread_pct,
    )
