"""Longest total first: like longest first, but started trajectories go on to their end."""

from heddle_core.policy import TrajectoryView


class LongestTotal:
    """Key: output made plus output predicted to come; no eviction.

    Ordered by what *remains* (Algorithm 1), a long trajectory that has made progress falls behind
    others that have not started, so that all of them end together at the very end and all their KV
    is alive at once. Ordered by the total it keeps its place: the longest start first, still, but
    started ones go on, and the KV of the rest does not exist yet.
    """

    preemptive = False

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        """Return the predicted total of output tokens."""
        return t.output_tokens + remaining_tokens
