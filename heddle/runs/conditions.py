"""How late the clock of a run in real time was, and how busy its machine: figures of a summary.

A call that comes late delays what follows from it, so a run whose event loop falls behind takes
longer than its engines and tools do. Simulated time is never late. Engines on CPUs that others use
take longer than those of a sweep without them, and no profile can tell by how much.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heddle_runtime.clock import Lateness
    from heddle_runtime.cpu_load import CpuLoad

NOTED = 0.01
"""Share of the makespan above which a run is reported as late."""
INVALID = 0.05
"""Share above which its times are of no use beside those of other runs."""


def lateness_figures(
    lateness: "Lateness", makespan_s: float, trajectories: int
) -> dict[str, float | bool]:
    """Return what a summary says of the clock.

    `late_share` is the larger of two, over the makespan: the largest lateness of one call, and that
    of all calls together for each trajectory, since it adds up along a trajectory.
    """
    each_s = lateness.total_s / max(trajectories, 1)
    share = max(lateness.largest_s, each_s) / makespan_s if makespan_s > 0 else 0.0
    return {
        "late_max_s": lateness.largest_s,
        "late_mean_s": lateness.mean_s,
        "late_per_trajectory_s": each_s,
        "late_share": share,
        "comparable": share <= INVALID,
    }


def lateness_note(summary: Mapping[str, Any]) -> str | None:
    """Return one sentence about a run whose clock was late; None if it was not, or was not real."""
    share = summary.get("late_share", 0.0)
    if share <= NOTED:
        return None
    found = (
        f"its event loop fell behind: calls came up to {summary['late_max_s']:.3g} s late, and "
        f"{summary['late_per_trajectory_s']:.3g} s in all for each trajectory, "
        f"{share:.1%} of the makespan"
    )
    if summary["comparable"]:
        return f"{found}. Its times are too long by about that much"
    return (
        f"{found}. Above {INVALID:.0%} its times are not valid for comparison: run it again with a "
        "larger runtime.time_scale, or on a machine with less other load"
    )


BUSY = 0.1
"""Share of the CPUs' time above which a run is reported as one beside other work."""


def load_figures(load: "CpuLoad | None") -> dict[str, float | int]:
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
