"""Where the runs of a comparison are computed."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from heddle.executor import Executor, InProcess, OnProgress, Processes, Report, WorkerError
from heddle.ray.executor import RayTasks
from heddle.signals import StopSignals

ExecutorKind: TypeAlias = Literal["processes", "ray"]

MIN_STEPS_PER_PROCESS = 10_000
"""Fewer steps than this run faster here than a process starts."""

J = TypeVar("J")
R = TypeVar("R")
S = TypeVar("S")


def run_all(
    kind: ExecutorKind,
    shared: S,
    one: Callable[[S, J, Report | None], R],
    runs: Sequence[J],
    *,
    jobs: int | None,
    steps: int,
    out: Path | None,
    watch: OnProgress | None,
) -> list[R]:
    """The result of `one` for each of the runs, which have so many `steps` of trajectories in all.

    ``processes``: `jobs` of them; None: as many as there are cores and runs, if the work outweighs
    their start. ``ray``: tasks of a Ray cluster, `jobs` at once; None: as many as it has cores.
    Runs write their directories into `out`.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers.
        WorkerError: the process of a run was killed.
        KeyboardInterrupt: a signal.
    """
    executor: Executor[S]
    useful = max(1, min(os.cpu_count() or 1, len(runs), steps // MIN_STEPS_PER_PROCESS))
    processes = useful if jobs is None else jobs
    if kind == "ray":
        executor = RayTasks(shared, at_once=jobs, out=out)
    else:
        executor = InProcess(shared) if processes == 1 else Processes(processes, shared)
    done: dict[int, R] = {}
    try:
        with StopSignals():
            done.update(executor.map(one, runs, watch))
    except (KeyboardInterrupt, WorkerError) as e:
        if out is not None:
            e.add_note(f"{len(done)} of {len(runs)} runs are finished and stay in {out}.")
        raise
    return [done[index] for index in range(len(runs))]
