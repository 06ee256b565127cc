"""`heddle calibrate check`: what the simulator makes of a run on engines, beside what it was.

A run is simulated again with its own trace, configuration, policy, seed and setting, on engines of
the profile with the KV space that its own engines had, which die when its own did; a search for a
plan takes as long as it took. Its error is then that of profile and simulator together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.stats import spearmanr

from heddle.config import RunConfig
from heddle.journal_rows import encode
from heddle.metrics import Measured, measure
from heddle.runs import Run, RunError
from heddle.simulation import (
    policy_of,
    profile_of,
    setting_for,
    solo_tpot_of,
    workload_of,
    world_of,
)
from heddle_core.commands import SolvePlan
from heddle_core.controller import Controller
from heddle_core.events import EngineFailed, EngineReady, PlanSolved
from heddle_core.ids import EngineId, EngineShape
from heddle_core.journal import Entry
from heddle_rollout.core import RecordedCore
from heddle_sim.config import SimulationConfig
from heddle_sim.latency import LatencyTable
from heddle_sim.profile_files import Profile, ProfileError
from heddle_sim.rollout import simulate_rollout
from heddle_trace.errors import TraceError
from heddle_trace.files import read_trace
from heddle_trace.schema import TrajectoryScript

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
    """One figure of a run."""

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
    """What all runs that can be ranked together have in common."""
    figures: Mapping[str, Figure]
    finish_order: float | None
    """Spearman's rank correlation of finish times over trajectories; None for a single one."""

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        figures = {
            name: {"measured": f.measured, "simulated": f.simulated, "error_pct": f.error_pct}
            for name, f in self.figures.items()
        }
        return {
            "run": self.run,
            "policy": self.policy,
            "seed": self.seed,
            "trace": self.trace,
            **figures,
            "finish_order": self.finish_order,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Policies on one trace and cluster, best first, by mean makespan."""

    trace: str
    measured: tuple[str, ...]
    simulated: tuple[str, ...]
    pairs: int
    """Pairs of policies that can be told apart in the measured runs."""
    alike: int
    """Of these, pairs that the simulator puts in the same order."""
    spread_pct: float | None
    """The widest range of makespans of one policy over repeated runs; None without repeats."""

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "trace": self.trace,
            "measured": list(self.measured),
            "simulated": list(self.simulated),
            "pairs": self.pairs,
            "alike": self.alike,
            "spread_pct": self.spread_pct,
        }


def check(run: Run, profile_path: Path | None = None) -> Checked:
    """Simulate a finished run on engines again.

    Raises:
        RunError: it was simulated itself, or its trace is gone or another.
        ProfileError: the profile is of another model or GPU class, or lacks a TP degree.
    """
    if run.manifest["driver"] != "heddle_runtime":
        raise RunError(
            f"{run.path}: was simulated itself (driver {run.manifest['driver']!r}), which checks "
            f"nothing; give runs of `heddle run`"
        )
    if run.config.live.agents:
        raise RunError(
            f"{run.path}: its agents were live, and no trace says what they would do; "
            f"give replays (`heddle trace extract` makes a trace of it that can be replayed)"
        )
    config = _profiled(run, profile_path)
    _same_trace(run, config)
    simulated = _simulate(run, config)
    summary = run.summary
    figures = {
        name: _figure(name, summary.get(name), simulated.summary.get(name)) for name in FIGURES
    }
    cluster = replace(config.cluster, model="")
    return Checked(
        run=str(run.path),
        policy=run.manifest["policy"],
        seed=run.manifest["seed"],
        trace=run.manifest["trace"]["name"],
        kind=repr((run.manifest["trace"]["sha256"], cluster, config.runtime, config.missing)),
        figures=figures,
        finish_order=_finish_order(run.trajectories, simulated.trajectories),
    )


def _profiled(run: Run, path: Path | None) -> RunConfig:
    """The run's configuration with the profile to simulate with in the place of its own."""
    config = run.config
    if path is None:
        return config
    given = replace(config, cluster=replace(config.cluster, model=str(path)))
    profile = profile_of(given.cluster)
    own: Profile | None = None
    try:
        own = profile_of(config.cluster)
    except ProfileError:
        # The file that it was run with is gone: then the name in the path has to do.
        if Path(config.cluster.model).stem != profile.model:
            raise
    for what, mine, theirs in (
        ("model", profile.model, own.model if own is not None else profile.model),
        ("GPU class", profile.gpu, own.gpu if own is not None else profile.gpu),
    ):
        if mine != theirs:
            raise ProfileError(
                f"{path}: is a profile of {what} {mine!r}, but {run.path} ran {theirs!r}; "
                f"fit one of that, or give runs of this"
            )
    return given


def _same_trace(run: Run, config: RunConfig) -> None:
    recorded_sha = run.manifest["trace"]["sha256"]
    where = (
        f"{run.path}: simulating it again takes the trace that it replayed, {config.trace} "
        f"(sha256 {recorded_sha[:16]}, seen from the folder in which the run was started)"
    )
    try:
        found = read_trace(Path(config.trace)).sha256
    except TraceError as error:
        raise RunError(f"{where}: {error}") from None
    if found != recorded_sha:
        raise RunError(f"{where}: the file that is there now has sha256 {found[:16]}")


def _simulate(run: Run, config: RunConfig) -> Measured:
    profile = profile_of(config.cluster)
    setting = run.setting or setting_for(config)
    controller = Controller(policy_of(config, setting))
    entries: list[Entry] = []
    simulate_rollout(
        _scripts(config),
        RecordedCore(controller, entries.append),
        _world(run, config, profile),
    )
    table = pa.Table.from_batches([encode(entries, 0)]).unify_dictionaries()
    return measure(table, solo_tpot_of(profile, config.cluster))


def _scripts(config: RunConfig) -> list[TrajectoryScript]:
    """The trace as the run replayed it: real engines are given tools at another pace, and no tool
    call longer than the limit."""
    runtime = config.runtime
    scale = runtime.time_scale if runtime.engine != "fake" else 1.0
    most_s = runtime.tool_limit_s if runtime.tool_limit_s is not None else float("inf")
    return [
        replace(
            script,
            steps=tuple(
                replace(step, tool_s=min(step.tool_s * scale, most_s)) for step in script.steps
            ),
        )
        for script in workload_of(config).scripts
    ]


def _world(run: Run, config: RunConfig, profile: Profile) -> SimulationConfig:
    """The profile's world with what is known of this run's own engines."""
    capacity: dict[int, int] = {}
    faults: list[tuple[float, EngineId]] = []
    searched: list[float] = []
    asked: dict[int, float] = {}
    for entry in run.entries():
        for command in entry.commands:
            if isinstance(command, SolvePlan):
                asked[command.plan] = entry.event.time_s
        match entry.event:
            case PlanSolved(time_s=time_s, plan=plan) if plan in asked:
                searched.append(time_s - asked[plan])
            case EngineReady(shape=EngineShape(tp=tp), kv_capacity_tokens=tokens):
                capacity.setdefault(tp, tokens)
            case EngineFailed(time_s=time_s, engine=engine):
                faults.append((time_s, engine))
    of_profile = world_of(config.cluster, profile)

    def table(gpu: str, tp: int) -> LatencyTable:
        found = of_profile.table(gpu, tp)
        return replace(found, kv_capacity_tokens=capacity.get(tp, found.kv_capacity_tokens))

    world = replace(
        of_profile,
        table=table,
        faults=tuple(faults),
        planning_s=fmean(searched) if searched else None,
    )
    if config.runtime.engine == "fake":
        return world
    return replace(
        world,
        moves_by="prefill" if config.runtime.kv_transfer == "none" else "kv",
        max_batched_tokens=config.runtime.max_batched_tokens,
    )


def _figure(name: str, measured: float | None, simulated: float | None) -> Figure:
    error_pct: float | None = None
    if measured is not None and simulated is not None:
        if name == "prefix_hit":
            error_pct = (simulated - measured) * 100
        elif measured > 0:
            error_pct = (simulated / measured - 1) * 100
    return Figure(measured=measured, simulated=simulated, error_pct=error_pct)


def _finish_order(measured: pa.Table, simulated: pa.Table) -> float | None:
    """Spearman's correlation over the trajectories that both finished."""
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

    Measured makespans that differ by less than `tie_pct`, or by less than repeated runs of one
    policy do, are no order that anything could get wrong.
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
    told_apart = [
        (a, b)
        for a, b in combinations(mean, 2)
        if max(mean[a], mean[b]) > min(mean[a], mean[b]) * least
    ]
    alike = sum((mean[a] < mean[b]) == (other[a] < other[b]) for a, b in told_apart)
    return Ranking(
        trace=group[0].trace,
        measured=tuple(sorted(mean, key=lambda policy: mean[policy])),
        simulated=tuple(sorted(other, key=lambda policy: other[policy])),
        pairs=len(told_apart),
        alike=alike,
        spread_pct=spread_pct,
    )
