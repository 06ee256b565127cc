"""Lower bounds of a finished run's makespan: its manifest's, or those of the trace it replayed."""

from math import inf
from typing import Any

from heddle.runs import Run
from heddle.runs.manifest import SIMULATED
from heddle.setup import Workspace, makespan_bound


def run_bound(run: Run, workspace: Workspace | None = None) -> dict[str, Any]:
    """The bounds of a run's makespan in seconds, or `why` there are none.

    Runs that have their trace in common are bounded with one `workspace`, which reads it once.
    """
    shared = Workspace() if workspace is None else workspace
    driver = run.manifest.get("driver")
    if driver != SIMULATED:
        return {
            "why": f"bounds hold for the simulated cluster, and this run was driven by {driver}"
        }
    if run.manifest.get("loop"):
        return {"why": "a loop trains on a part of its trace, and no bound is computed for that"}
    kept = run.manifest.get("bound")
    if kept and "makespan_s" in kept and all(0.0 <= each < inf for each in kept.values()):
        return dict(kept)
    try:
        config = run.config
        *_, trace = shared.completed(config)
        if trace.sha256 != run.manifest["trace"]["sha256"]:
            return {"why": f"{config.trace} is no longer the trace that was replayed"}
        workload, profiles = shared.workload(config), shared.profiles(config.cluster)
        return makespan_bound(workload, profiles, config.cluster).seconds()
    except (OSError, ValueError) as error:
        return {"why": f"the trace or its profile cannot be read: {error}"}
