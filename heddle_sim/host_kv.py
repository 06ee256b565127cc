"""KV in host memory: a tier behind the prefix caches of engines.

vLLM's offloading connectors copy each block out as soon as it is computed, beside the computation,
and find it again by its content. So a context is here up to its newest whole block: after a step,
after a preemption, and, in a store that engines share, after the end of its engine. A copy to the
host takes no time here; a load takes its bytes over the bandwidth.

Only a trajectory's own context is found. The prompt that it shares with its group is not.
"""

from heddle_core.ids import TrajectoryId
from heddle_sim.request import Request


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


class Load:
    """A context on its way from host memory, and the blocks of the engine that it takes."""

    __slots__ = ("blocks", "end_s", "epoch", "request")

    def __init__(self, request: Request, blocks: int, epoch: int, end_s: float) -> None:
        self.request = request
        self.blocks = blocks
        self.epoch = epoch
        self.end_s = end_s


class HostLink:
    """One engine's way to host memory: one load at a time.

    A load of `n` blocks takes ``fixed_s + n * s_per_block``.
    """

    __slots__ = ("_fixed_s", "_free_s", "_s_per_block", "begun", "loading", "store")

    def __init__(self, store: HostKv, fixed_s: float, s_per_block: float) -> None:
        self.store = store
        self._fixed_s = fixed_s
        self._s_per_block = s_per_block
        self._free_s = 0.0
        """When the last load ends."""
        self.begun: list[Load] = []
        """Loads that the engine has not scheduled yet."""
        self.loading = 0
        """Loads that have not ended."""

    def begin(self, request: Request, blocks: int, missing: int, epoch: int, now_s: float) -> None:
        """Begin to load `missing` of a context's `blocks`, after the loads before it."""
        seconds = self._fixed_s + self._s_per_block * missing
        self._free_s = max(self._free_s, now_s) + seconds
        self.loading += 1
        self.begun.append(Load(request, blocks, epoch, self._free_s))
