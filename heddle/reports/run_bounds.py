"""Lower bounds of a finished run's makespan, from its configuration and the trace it replayed."""

from dataclasses import asdict
from typing import Any

from heddle.runs import Run
from heddle.setup import Workspace, makespan_bound

SIMULATED = "heddle_sim"


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
    try:
        config = run.config
        found = shared.trace(config.trace).sha256
        if found != run.manifest["trace"]["sha256"]:
            return {"why": f"{config.trace} is no longer the trace that was replayed"}
        workload, profiles = shared.workload(config), shared.profiles(config.cluster)
        bound = asdict(makespan_bound(workload, profiles, config.cluster))
        return {name: value for name, value in bound.items() if name.endswith("_s")}
    except (OSError, ValueError) as error:
        return {"why": f"the trace or its profile cannot be read: {error}"}
