"""KV that is kept at home for a limited time while a tool runs.

This file is part of the controller: it reads no clock and does no I/O.
"""

from heapq import heappop, heappush

from heddle_core.trajectory import Trajectory


class Retention:
    """Trajectories by the time until which their KV is kept."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, int, int, Trajectory]] = []
        """Heap of (time_s, arrival, step, trajectory); stale entries are skipped."""

    def keep(self, t: Trajectory, until_s: float) -> None:
        """Keep the KV of `t`, which is in a tool, until then."""
        t.keep_until_s = until_s
        heappush(self.ends, (until_s, t.arrival, t.step, t))

    @property
    def next_s(self) -> float | None:
        """The earliest end of those whose tool still runs."""
        ends = self.ends
        while ends and not _waits(ends[0]):
            heappop(ends)
        return ends[0][0] if ends else None

    def ended(self, now_s: float) -> list[Trajectory]:
        """Remove and return those whose time is over, by their ends."""
        found = []
        while (next_s := self.next_s) is not None and next_s <= now_s:
            found.append(heappop(self.ends)[3])
        return found


def _waits(entry: tuple[float, int, int, Trajectory]) -> bool:
    until_s, _, step, t = entry
    return t.phase == "tool" and t.step == step and t.keep_until_s == until_s
