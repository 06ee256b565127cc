"""Lower bounds of a finished run's makespan, from its configuration and the trace it replayed."""

from dataclasses import asdict
from typing import Any

from heddle.runs import Run
from heddle.simulation import bound_of, trace_at

SIMULATED = "heddle_sim"


def run_bound(run: Run) -> dict[str, Any]:
    """The bounds of a run's makespan in seconds, or `why` there are none."""
    driver = run.manifest.get("driver")
    if driver != SIMULATED:
        return {
            "why": f"bounds hold for the simulated cluster, and this run was driven by {driver}"
        }
    try:
        config = run.config
        found = trace_at(config.trace).sha256
        if found != run.manifest["trace"]["sha256"]:
            return {"why": f"{config.trace} is no longer the trace that was replayed"}
        return asdict(bound_of(config))
    except (OSError, ValueError) as error:
        return {"why": f"the trace or its profile cannot be read: {error}"}
