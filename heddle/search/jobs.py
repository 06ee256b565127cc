"""Races of rollouts and the jobs of all races: one simulation of a rollout, or of a loop."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from heddle.comparison.tuning import with_policy
from heddle.config import RunConfig
from heddle.executor import Report
from heddle.search.draws import drawn
from heddle.search.makespan import simulated
from heddle.search.race import CUT, FEWEST, MOST, NEVER, TRAJECTORIES, Job, OnRound, Race
from heddle.setup import Workspace, prepare
from heddle.workload import Workload
from heddle_core.events import Trained

if TYPE_CHECKING:
    from heddle.loops.config import LoopConfig


class PassedError(Exception):
    """A simulation has passed the time that it had."""


def race_of(
    config: RunConfig,
    workspace: Workspace,
    *,
    share: int = 1,
    jobs: int | None = None,
    budget_s: float | None = None,
    on_round: OnRound | None = None,
) -> Race:
    """A race of rollouts; `config` has the cluster whose workload is drawn from.

    A drawn rollout has one of `share` of its groups, and candidates as few GPUs.

    Raises:
        ConfigError: `jobs` is below 1.
    """
    workload = workspace.workload(config)
    return Race(
        (workspace, config, share),
        makespan_s,
        draws=draws_of(workload),
        steps=sum(len(script.steps) for script in workload.scripts) // share,
        executor=config.runtime.executor,
        jobs=jobs,
        budget_s=budget_s,
        on_round=on_round,
    )


def draws_of(workload: Workload) -> int:
    """Rollouts that are drawn from each half of the prompts."""
    return max(FEWEST, min(MOST, TRAJECTORIES // workload.trajectories))


def makespan_s(
    shared: tuple[Workspace, RunConfig, int], job: Job, report: Report | None
) -> tuple[float, float, int]:
    """One simulation of a race, as a job of an executor; see `Race`."""
    began_s = time.perf_counter()

    if time.time() > job.ends_s:
        return CUT, 0.0, 0

    def check_time(*_: object) -> None:
        if time.time() > job.ends_s:
            raise PassedError

    workspace, config, share = shared
    candidate, draw = job.candidate, job.draw
    if draw.half == "whole":
        config = replace(config, seed=config.seed + draw.number)
        workload = workspace.workload(config)
    else:
        workload = drawn(workspace.workload(config), draw, config.seed, share=share)
    cluster = replace(candidate.cluster, gpus=candidate.cluster.gpus // share)
    mine = with_policy(config, candidate.policy, cluster)
    setup = prepare(mine, workspace=workspace, workload=workload)
    try:
        limit = check_time if job.ends_s < NEVER else None
        seconds, running = simulated(setup, job.stop_s, limit)
    except PassedError:
        return CUT, 0.0, 0
    if report is not None:
        report(1)
    return seconds, time.perf_counter() - began_s, running


def batch_s(
    shared: "tuple[Workspace, LoopConfig, int, Workload]",
    job: Job,
    report: Report | None,
) -> tuple[float, float, int]:
    """One loop of a race, as a job of an executor: mean time of a batch, and its wall time.

    It is stopped where the measured batches take longer than the job allows all of them, and where
    the time of the race is spent.
    """
    # Here, since a search of rollouts needs none of them, and imports take a tenth of a second.
    from heddle.loops.comparison import run_loop
    from heddle.loops.setup import prepare_loop
    from heddle.loops.splits import on_loop

    began_s = time.perf_counter()

    def is_over() -> bool:
        return time.time() > job.ends_s

    if is_over():
        return CUT, 0.0, 0
    workspace, config, short, workload = shared
    if job.draw.half == "search":
        config = replace(config, batches=short)
    setup = prepare_loop(
        on_loop(job.candidate, config),
        job.candidate.regime,
        workspace=workspace,
        workload=drawn(workload, job.draw, config.run.seed),
    )
    ends_s: list[float] = []
    measured = config.batches - setup.first_measured

    def trained(event: Trained) -> None:
        ends_s.append(event.time_s)
        begun = ends_s[setup.first_measured - 1 :]
        slow = begun and begun[-1] - begun[0] > job.stop_s * measured
        if slow or is_over():
            raise PassedError

    try:
        seconds = run_loop(setup, trained)[0].mean_step_s
    except PassedError:
        seconds = CUT if is_over() else NEVER
    if report is not None:
        report(1)
    return seconds, time.perf_counter() - began_s, 0
