"""Round robin over trajectories: the fewest finished steps go first."""

from heddle_core.policy import TrajectoryView


class RoundRobin:
    """The trajectory with the fewest finished steps goes first; ties by arrival in the queue.

    The Heddle paper (arXiv 2603.28101) calls the order of its baselines round robin and sends a
    trajectory that returns from its tool to the tail of the queue. Read literally, that is arrival
    of the step, exactly `Fcfs`; but the paper plots FCFS and round robin separately. This part is a
    reading under which they differ: no trajectory gets another step while one with fewer steps
    waits at the same engine.
    """

    preemptive = False

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        """Return minus the number of finished steps."""
        return -float(t.step)
