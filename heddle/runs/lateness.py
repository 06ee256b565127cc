"""How late the clock of a run in real time was, as figures of its summary.

A call that comes late delays what follows from it, so a run whose event loop falls behind takes
longer than its engines and tools do. Simulated time is never late.
"""

from collections.abc import Mapping
from typing import Any

from heddle_runtime.clock import Lateness

NOTED = 0.01
"""Share of the makespan above which a run is reported as late."""
INVALID = 0.05
"""Share above which its times are of no use beside those of other runs."""


def lateness_figures(
    lateness: Lateness, makespan_s: float, trajectories: int
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
