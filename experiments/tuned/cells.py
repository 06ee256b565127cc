"""Runs of nine cells, and what follows from them: baselines at their best settings beside policies.

A *setting* is a TP degree and a number of running steps. The best of a baseline has the lowest mean
makespan over the rollouts that the policies are compared on: the hindsight is the baseline's.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from experiments.harness.jobs import Computation, Job, Rollout
from experiments.harness.running import trace_of
from experiments.harness.store import Store
from heddle.cluster.config import ClusterConfig, HostKvScope
from heddle.comparison.tuning import TUNED_BASELINES, tuning, with_policy
from heddle.config import RunConfig
from heddle.setup import Workspace, ideal_levels, makespan_bound, prepare

SCHEMA = "heddle.experiment-limits/1"
WORKLOADS = ("coding", "search", "math")
MODELS = {"8b": "qwen3-8b", "14b": "qwen3-14b", "32b": "qwen3-32b"}
SHARE = {"8b": 1.0, "14b": 1.0, "32b": 0.5}
"""Of the trajectories per GPU that are asked for: 32B has KV for fewer."""
SETTING = re.compile(
    r"tp(?P<tp>\d+)(/(?P<slots>\d+))?|start(?P<start_s>\d+(\.\d+)?)|standby(?P<standby>\d+(\+\d+)*)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A workload on a model."""

    workload: str
    size: str

    @property
    def name(self) -> str:
        """As on the command line: ``coding-14b``."""
        return f"{self.workload}-{self.size}"


CELLS = {
    cell.name: cell for cell in (Cell(workload=w, size=size) for w in WORKLOADS for size in MODELS)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A row before its runs: a policy at a setting, with a job for each rollout."""

    name: str
    baseline: bool
    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCell:
    """Everything that a cell needs."""

    cell: Cell
    entries: tuple[Entry, ...]
    limits: tuple[Computation, ...]
    """Bound and ideals, one for each rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A policy in a cell; means over rollouts."""

    cell: str
    policy: str
    baseline: bool
    makespan_s: float
    over_best: float
    """The best baseline's makespan over this one's."""
    over_best_least: float
    """The least over the rollouts."""
    over_best_most: float
    of_bound: float
    of_fluid: float
    of_equal_progress: float


def planned(
    cell: Cell,
    *,
    gpus: int,
    per_gpu: int,
    seeds: Sequence[int],
    policies: Sequence[str],
    store: Store,
    host_kv: HostKvScope = "none",
) -> PlannedCell:
    """The runs of a cell: every baseline at every setting that each rollout allows.

    A policy runs as the defaults say, or at the setting that its name ends with: ``@tp4/200``,
    ``@start5`` (seconds in which engines start), ``@standby4+8`` (degrees of engines asleep).
    `host_kv` is everybody's.

    Raises:
        ValueError: one of the packages' errors for bad input.
    """
    rollouts = [
        Rollout(
            workload=cell.workload,
            trajectories=max(round(gpus * per_gpu * SHARE[cell.size]), 1),
            seed=seed,
        )
        for seed in seeds
    ]
    cluster = ClusterConfig(model=MODELS[cell.size], gpus=gpus, host_kv=host_kv)
    configs = [
        RunConfig(trace=str(trace_of(rollout, store.folder)), cluster=cluster)
        for rollout in rollouts
    ]
    shared = Workspace()
    found = [tuning(c, tps="best", slots="best", workspace=shared) for c in configs]
    settings = [c for c in found[0].settings if all(c in other.settings for other in found)]
    base = max((each.base for each in found), key=lambda c: c.tp)

    def entry(name: str, policy: str, at: ClusterConfig, *, baseline: bool) -> Entry:
        jobs = tuple(Job(rollout=rollout, cluster=at, policy=policy) for rollout in rollouts)
        return Entry(name=name, baseline=baseline, jobs=jobs)

    entries = [
        entry(f"{policy}@tp{at.tp}/{at.max_running}", policy, at, baseline=True)
        for policy in TUNED_BASELINES
        for at in settings
    ]
    for name in policies:
        policy, at = _setting(name, base)
        # Refused now, and not after hours of other runs.
        prepare(with_policy(configs[0], policy, at), workspace=shared)
        entries.append(entry(name, policy, at, baseline=False))
    clusters = [job.cluster for each in entries for job in each.jobs]
    widest = replace(base, max_running=max(c.max_running for c in clusters))
    limits = tuple(
        Computation(
            question={
                "schema": SCHEMA,
                "rollout": msgspec.to_builtins(rollout),
                "cluster": msgspec.to_builtins(widest),
            },
            make=partial(limits_of, rollout, widest, store.folder),
        )
        for rollout in rollouts
    )
    return PlannedCell(cell=cell, entries=tuple(entries), limits=limits)


def _setting(name: str, base: ClusterConfig) -> tuple[str, ClusterConfig]:
    """A policy's name without its setting, and the cluster with it."""
    policy, at, text = name.partition("@")
    if not at:
        return policy, base
    found = SETTING.fullmatch(text)
    if found is None:
        raise ValueError(
            f"policy {name!r}: write a setting as @tp4, @tp4/200 with the slots, @start5 or "
            "@standby4+8"
        )
    if found["start_s"]:
        return policy, replace(base, engine_start_s=float(found["start_s"]))
    if found["standby"]:
        return policy, replace(base, standby_tp=tuple(map(int, found["standby"].split("+"))))
    slots = int(found["slots"]) if found["slots"] else base.max_running
    return policy, replace(base, tp=int(found["tp"]), max_running=slots)


def limits_of(rollout: Rollout, cluster: ClusterConfig, folder: Path) -> Mapping[str, Any]:
    """Proven bound and ideals of a rollout, in seconds."""
    shared = Workspace()
    config = RunConfig(trace=str(trace_of(rollout, folder)), cluster=cluster)
    workload, profiles = shared.workload(config), shared.profiles(cluster)
    bound = makespan_bound(workload, profiles, cluster)
    return {"bound_s": bound.makespan_s, **asdict(ideal_levels(workload, profiles, cluster, bound))}


def rows(planned_cell: PlannedCell, store: Store) -> list[Row]:
    """The best setting of each baseline, best baseline first, then the policies.

    Raises:
        KeyError: a run is not there.
    """
    limits = [store.get(each.key) for each in planned_cell.limits]
    bound, fluid, equal = (
        math.fsum(each[key] for each in limits) / len(limits)
        for key in ("bound_s", "fluid_s", "equal_progress_s")
    )
    each_s = {
        entry.name: [float(store.get(job.key)["makespan_s"]) for job in entry.jobs]
        for entry in planned_cell.entries
    }
    makespan = {name: math.fsum(found) / len(found) for name, found in each_s.items()}
    best: dict[str, str] = {}
    for entry in planned_cell.entries:
        if entry.baseline:
            known = best.setdefault(entry.jobs[0].policy, entry.name)
            if makespan[entry.name] < makespan[known]:
                best[entry.jobs[0].policy] = entry.name
    baselines = sorted(best.values(), key=lambda name: makespan[name])
    policies = [entry.name for entry in planned_cell.entries if not entry.baseline]
    best_s = each_s[baselines[0]]
    over = {name: [b / s for b, s in zip(best_s, each_s[name], strict=True)] for name in each_s}
    return [
        Row(
            cell=planned_cell.cell.name,
            policy=name,
            baseline=name in baselines,
            makespan_s=makespan[name],
            over_best=makespan[baselines[0]] / makespan[name],
            over_best_least=min(over[name]),
            over_best_most=max(over[name]),
            of_bound=bound / makespan[name],
            of_fluid=fluid / makespan[name],
            of_equal_progress=equal / makespan[name],
        )
        for name in (*baselines, *policies)
    ]


def summaries(found: Sequence[Row]) -> Iterator[tuple[str, str, dict[str, float]]]:
    """For each policy, "mean" and "worst" over cells of each ratio; means are geometric."""
    for policy in dict.fromkeys(row.policy for row in found if not row.baseline):
        mine = [row for row in found if row.policy == policy]
        ratios = {
            key: [getattr(row, key) for row in mine]
            for key in ("over_best", "of_bound", "of_fluid", "of_equal_progress")
        }
        means = {
            key: math.exp(math.fsum(map(math.log, values)) / len(values))
            for key, values in ratios.items()
        }
        yield policy, "mean", means
        yield policy, "worst", {key: min(values) for key, values in ratios.items()}
