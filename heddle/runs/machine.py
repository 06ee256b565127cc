"""How busy the machine of a run was with other work, as figures of its summary.

Engines on CPUs that others use take longer than those of a sweep without them, and no profile can
tell by how much.
"""

from collections.abc import Mapping
from typing import Any

from heddle_runtime.cpu_load import CpuLoad

BUSY = 0.1
"""Share of the CPUs' time above which a run is reported as one beside other work."""


def load_figures(load: CpuLoad | None) -> dict[str, float | int]:
    """Return what a summary says of other processes; nothing without a measurement."""
    if load is None:
        return {}
    return {"other_cpus": load.others, "machine_cpus": load.cpus}


def other_cpu_share(summary: Mapping[str, Any]) -> float | None:
    """Return what other processes took of the CPUs' time; None if it was not measured."""
    others, cpus = summary.get("other_cpus"), summary.get("machine_cpus")
    return others / cpus if others is not None and cpus else None


def load_note(summary: Mapping[str, Any]) -> str | None:
    """Return one sentence about a run on a busy machine; None if it was not, or not measured."""
    share = other_cpu_share(summary)
    if share is None or share <= BUSY:
        return None
    return (
        f"the machine was busy: other processes took {summary['other_cpus']:.1f} of its "
        f"{summary['machine_cpus']} CPUs while the engines ran ({share:.0%}). Its times may be too "
        "long for that reason, and not by an error of the profile: run it again while nothing else "
        "runs"
    )
