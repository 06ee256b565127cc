"""Longest total first in a batch, short ones first where trajectories arrive one by one."""

from heddle_core.estimate.arrival_waves import ArrivalWaves
from heddle_core.parts.scheduler.longest_total import LongestTotal
from heddle_core.parts.scheduler.sjf_aged import ShortestAged
from heddle_core.policy import TrajectoryView


class ByArrivals:
    """`LongestTotal` while most unfinished trajectories came in one wave, else `ShortestAged`.

    The first is for the end of a batch, the second for the mean time of a trajectory; which of them
    is in force is for `ArrivalWaves`. Keys of `LongestTotal` are above those of `ShortestAged`: a
    step that was queued in a batch goes before one that was not.
    """

    preemptive = False

    def __init__(self) -> None:
        self._waves = ArrivalWaves()
        self._in_batch, self._one_by_one = LongestTotal(), ShortestAged()

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        """Return the key of the order in force."""
        self._waves.arrived(t.arrival + 1)
        if self._waves.batch:
            return self._in_batch.priority(t, remaining_tokens)
        return self._one_by_one.priority(t, remaining_tokens)

    def observe_finish(self, t: TrajectoryView) -> None:
        """Count the end of a trajectory."""
        self._waves.ended(t.arrival)
