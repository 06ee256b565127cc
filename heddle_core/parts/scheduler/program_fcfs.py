"""First come, first served by trajectory: a step is as old as the trajectory that it is of."""

from typing import Final

from heddle_core.policy import TrajectoryView

_KEPT_FIRST: Final = 1e9  # more arrivals than any run has


class ProgramFcfs:
    """The order of Continuum (arXiv 2511.02230): KV in place first, then the earlier trajectory.

    A step whose KV was kept through its tool call goes before all whose was not. Within both, the
    trajectory that arrived earlier goes first, however late its step became runnable.
    """

    preemptive = False

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        """Return minus the number of the arrival, raised for kept KV."""
        return (_KEPT_FIRST if t.kv_kept else 0.0) - t.arrival
