"""Where the runs of a comparison are computed."""

import os
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from heddle.executor import Executor, InProcess, Processes
from heddle.ray.executor import RayTasks

ExecutorKind: TypeAlias = Literal["processes", "ray"]

MIN_STEPS_PER_PROCESS = 20_000
"""Fewer steps than this run faster here than a process starts (about a second of imports)."""

S = TypeVar("S")


def executor_for(
    kind: ExecutorKind,
    shared: S,
    *,
    jobs: int | None,
    runs: int,
    steps: int,
    out: Path | None = None,
) -> Executor[S]:
    """An executor for so many `runs` with so many `steps` of trajectories in all.

    ``processes``: `jobs` of them; None: as many as there are cores and runs, if the work outweighs
    their start. ``ray``: tasks of a Ray cluster, `jobs` at once; None: as many as it has cores.
    Runs write their directories into `out`.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers.
    """
    if kind == "ray":
        return RayTasks(shared, at_once=jobs, out=out)
    useful = max(1, min(os.cpu_count() or 1, runs, steps // MIN_STEPS_PER_PROCESS))
    processes = useful if jobs is None else jobs
    return InProcess(shared) if processes == 1 else Processes(processes, shared)
