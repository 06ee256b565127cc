"""Several policies on one trace and cluster, several seeds each: one table."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle.executor import Executor, InProcess, Processes, Report, WorkerError
from heddle.knowledge import HistorySource
from heddle.runs.bound import Bound
from heddle.setup import Workspace, makespan_bound, prepare
from heddle.signals import StopSignals
from heddle.simulation import RunResult, simulate
from heddle.workload import Workload
from heddle_sim.profile_files import Profile

SCHEMA = "heddle.compare/1"
MAX_SEEDS = 1_000
MIN_STEPS_PER_PROCESS = 20_000
"""Fewer steps than this run faster here than a process starts (about a second of imports)."""

SEED_END = 2**32

OnProgress: TypeAlias = Callable[[Sequence[int], int], None]
"""Called with how many trajectories each run has finished, and how many a run has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Mean over seeds, and the half-width of its 95 % confidence interval (Student's t).

    `ci95` is None with one seed: one run gives no spread.
    """

    mean: float
    ci95: float | None

    def plain(self) -> dict[str, float | None]:
        """As JSON."""
        return {"mean": self.mean, "ci95": self.ci95}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """One policy over all seeds."""

    policy: str
    makespan_s: Estimate
    throughput_tok_s: Estimate
    speedup: float
    """Mean throughput over that of the first policy named."""
    bound_fraction: float
    """Lower bound of the makespan over the mean makespan; 1 could not be better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What `heddle compare` reports."""

    config: RunConfig
    """Of the first run."""
    workload: Workload
    """Under the first seed."""
    profile: Profile
    history: HistorySource
    bound: Bound
    runs: tuple[RunResult, ...]
    policies: tuple[PolicyResult, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON; equal seeds give equal values but for `wall_s` and `run`."""
        trace, cluster = self.workload.trace, self.config.cluster
        return {
            "schema": SCHEMA,
            "trace": {
                "name": trace.name,
                "trajectories": len(self.workload.scripts),
                "output_tokens": self.workload.output_tokens,
                "sha256": trace.sha256,
                "dropped_over_capacity": len(self.workload.dropped),
                **self.workload.filled,
            },
            "cluster": {
                "gpus": cluster.gpus,
                "gpu": cluster.gpu,
                "model": cluster.model,
                "profile": f"{self.profile.model}.{self.profile.gpu}",
                "tp": cluster.tp,
                **({"mix": list(cluster.mix)} if cluster.mix else {}),
                "max_running": cluster.max_running,
            },
            "history": self.history.plain(),
            "bound": {
                "makespan_s": self.bound.makespan_s,
                "solo_s": self.bound.solo_s,
                "capacity_s": self.bound.capacity_s,
                **({"tools_s": self.bound.tools_s} if cluster.tool_capacity else {}),
            },
            "runs": [run.row() for run in self.runs],
            "policies": [
                {
                    "policy": p.policy,
                    "makespan_s": p.makespan_s.plain(),
                    "throughput_tok_s": p.throughput_tok_s.plain(),
                    "speedup": p.speedup,
                    "bound_fraction": p.bound_fraction,
                }
                for p in self.policies
            ],
        }


def compare(
    config: RunConfig,
    policies: Sequence[str],
    *,
    seeds: int = 1,
    out: Path = Path("runs"),
    jobs: int | None = None,
    config_text: str | None = None,
    on_progress: OnProgress | None = None,
) -> Comparison:
    """Run each policy under seeds `config.seed`, `config.seed` + 1, ...; put the results together.

    A seed draws values that the trace lacks and permutes the order of its groups, in the same way
    for every policy. The number of processes `jobs` (default: as many as are useful) changes no
    result. `on_progress` is called a few times a second; it lists runs by seed first, then by
    policy.

    Raises:
        ConfigError: no policy, a policy named twice, or an absurd number of seeds or jobs.
        ValueError: any other of the packages' errors for bad input, before the first run.
        OSError: a run directory cannot be written.
        WorkerError: a process of `jobs` was killed.
        KeyboardInterrupt: a signal ended the run; unfinished runs are marked interrupted. More
            signals change nothing.
    """
    _check(policies, seeds, config.seed, jobs)
    # By seed first: the trace is filled in once for all policies.
    configs = [_with_policy(config, p, config.seed + s) for s in range(seeds) for p in policies]
    shared = Workspace()
    first = shared.workload(config)
    profile = shared.profile(config.cluster)
    for first_of_each in configs[: len(policies)]:
        prepare(first_of_each, workspace=shared)
    bound = _bound(config, shared, seeds)
    steps = sum(len(script.steps) for script in first.scripts)
    processes = jobs if jobs is not None else _processes(len(configs), steps * len(configs))
    executor: Executor[Workspace] = (
        InProcess(shared) if processes == 1 else Processes(processes, shared)
    )
    one = partial(_simulate, out=out, config_text=config_text)
    total = first.trajectories
    watch = None if on_progress is None else lambda finished: on_progress(finished, total)
    done: dict[tuple[str, int], RunResult] = {}
    try:
        with StopSignals():
            for _, result in executor.map(one, configs, watch):
                done[result.policy, result.seed] = result
    except (KeyboardInterrupt, WorkerError) as e:
        e.add_note(f"{len(done)} of {len(configs)} runs are finished and stay in {out}.")
        raise
    runs = tuple(done[p, config.seed + s] for p in policies for s in range(seeds))
    return Comparison(
        config=config,
        workload=first,
        profile=profile,
        history=shared.history(config, first.trace),
        bound=bound,
        runs=runs,
        policies=tuple(_by_policy(policies, runs, bound)),
    )


def _with_policy(config: RunConfig, preset: str, seed: int) -> RunConfig:
    """The same run under another policy and seed."""
    return replace(config, policy=replace(config.policy, preset=preset), seed=seed)


def _simulate(
    shared: Workspace,
    config: RunConfig,
    report: Report | None,
    *,
    out: Path,
    config_text: str | None,
) -> RunResult:
    """One run of a comparison, as a job of an executor."""
    return simulate(
        prepare(config, workspace=shared),
        out=out,
        config_text=config_text,
        on_progress=None if report is None else lambda finished, total: report(finished),
    )


def _check(policies: Sequence[str], seeds: int, first_seed: int, jobs: int | None) -> None:
    if not policies:
        raise ConfigError("no policy is named; see `heddle policies`")
    twice = [p for p in dict.fromkeys(policies) if list(policies).count(p) > 1]
    if twice:
        raise ConfigError(f"policy {twice[0]!r} is named twice")
    if not 1 <= seeds <= MAX_SEEDS:
        raise ConfigError(f"seeds must be from 1 to {MAX_SEEDS:,}, not {seeds}")
    if first_seed + seeds > SEED_END:
        raise ConfigError(f"seed {first_seed} and {seeds - 1} after it pass {SEED_END - 1}")
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs must be 1 or more, not {jobs}")


def _bound(config: RunConfig, shared: Workspace, seeds: int) -> Bound:
    """The bound that holds for every seed: drawn values differ, so the lowest counts."""
    fill = shared.workload(config).fill
    drawn = fill is not None and any(f.sampled for f in fill.fields.values())
    profile = shared.profile(config.cluster)
    bounds = [
        makespan_bound(
            shared.workload(replace(config, seed=config.seed + s)), profile, config.cluster
        )
        for s in range(seeds if drawn else 1)
    ]
    return min(bounds, key=lambda b: b.makespan_s)


def _processes(runs: int, steps: int) -> int:
    """As many processes as there are cores and runs, if the work outweighs their start."""
    return max(1, min(os.cpu_count() or 1, runs, steps // MIN_STEPS_PER_PROCESS))


def _by_policy(
    policies: Sequence[str], runs: Sequence[RunResult], bound: Bound
) -> Iterator[PolicyResult]:
    reference: float | None = None
    for policy in policies:
        mine = [run.summary for run in runs if run.policy == policy]
        makespan = _estimate([s["makespan_s"] for s in mine])
        throughput = _estimate([s["throughput_tok_s"] for s in mine])
        reference = throughput.mean if reference is None else reference
        yield PolicyResult(
            policy=policy,
            makespan_s=makespan,
            throughput_tok_s=throughput,
            speedup=throughput.mean / reference,
            bound_fraction=bound.makespan_s / makespan.mean,
        )


def _estimate(values: Sequence[float]) -> Estimate:
    # Imported here: `heddle --help` should not wait for scipy.
    from scipy.special import stdtrit

    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean=mean, ci95=None)
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    return Estimate(mean=mean, ci95=float(stdtrit(n - 1, 0.975)) * math.sqrt(variance / n))
