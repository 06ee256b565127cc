"""Longest processing time first: the most left to generate goes first."""

from heddle_core.policy import TrajectoryView


class LongestFirst:
    """Orders the queue by predicted remaining tokens, longest first, and never evicts.

    The classic rule against long tails (Graham, 1969): what ends last should start first. It
    decides at dispatch only; `ProgressivePriority` is the same order with eviction.
    """

    preemptive = False

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        return remaining_tokens
