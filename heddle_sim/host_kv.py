"""KV in host memory: a tier behind the prefix caches of engines.

vLLM's offloading connectors copy each block out as soon as it is computed, beside the computation,
and find it again by its content. So a context is here up to its newest whole block: after a step,
after a preemption, and, in a store that engines share, after the end of its engine. A copy to the
host takes no time here; a load takes its bytes over the bandwidth (`heddle_sim.batching`).

Only a trajectory's own context is found. The prompt that it shares with its group is not.
"""

from heddle_core.ids import TrajectoryId


class HostKv:
    """Whole blocks by trajectory; the least recently stored give way, their tails first."""

    __slots__ = ("_blocks", "_capacity", "used")

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._blocks: dict[TrajectoryId, int] = {}
        """Least recently stored first."""
        self.used = 0
        """Blocks stored, over all trajectories."""

    def held(self, trajectory: TrajectoryId) -> int:
        """Blocks of a trajectory, from the begin of its context on."""
        return self._blocks.get(trajectory, 0)

    def put(self, trajectory: TrajectoryId, blocks: int) -> None:
        """Store a context of `blocks` whole blocks."""
        stored = self._blocks
        self.used += blocks - stored.pop(trajectory, 0)
        if blocks:
            stored[trajectory] = blocks
        while self.used > self._capacity:
            oldest = next(iter(stored))
            over = self.used - self._capacity
            if stored[oldest] > over:
                stored[oldest] -= over
                self.used -= over
            else:
                self.used -= stored.pop(oldest)

    def trim(self, trajectory: TrajectoryId, blocks: int) -> None:
        """Drop the tail of a context beyond `blocks`: it continues in another way."""
        held = self._blocks.get(trajectory, 0)
        if held > blocks:
            self.used -= held - blocks
            if blocks:
                self._blocks[trajectory] = blocks
            else:
                del self._blocks[trajectory]

    def clear(self) -> None:
        """Drop everything: the weights are others."""
        self._blocks.clear()
        self.used = 0
