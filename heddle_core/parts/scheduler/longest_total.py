"""Longest total first: like longest first, but started trajectories go on to their end."""

from mypy_extensions import mypyc_attr

from heddle_core.policy import TrajectoryView


@mypyc_attr(allow_interpreted_subclasses=True)
class LongestTotal:
    """Key: output made plus output predicted to come; no eviction.

    Ordered by *remaining* tokens (Algorithm 1), a long trajectory that has made progress falls
    behind others that have not started. All of them then end together, with all their KV in use at
    once. Ordered by the total it keeps its rank: the longest still start first, started ones
    continue, and the others use no KV yet.
    """

    preemptive = False

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        """Return the predicted total of output tokens."""
        return t.output_tokens + remaining_tokens
