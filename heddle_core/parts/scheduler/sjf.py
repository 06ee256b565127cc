"""Shortest job first: the least left to generate goes first."""

from heddle_core.policy import TrajectoryView


class ShortestFirst:
    """Orders the queue by predicted remaining tokens, shortest first, and never evicts.

    Best for the mean completion time of jobs on one machine, and the wrong order for a makespan: it
    shows how much an order can cost. The Heddle paper (arXiv 2603.28101) describes its Autellix
    baseline in these words; the part `Autellix` is what Autellix itself does.
    """

    preemptive = False

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        """Return minus the remaining tokens."""
        return -remaining_tokens
