"""Placement by a trajectory's name; the loss of an engine moves only its own trajectories."""

from bisect import bisect_left
from hashlib import blake2b

from heddle_core.ids import EngineId
from heddle_core.parts.placement.load_and_pin import OneByOne
from heddle_core.policy import TrajectoryView, View


def _point(key: str) -> int:
    # Python's own hash() is salted per process: equal runs would differ.
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest())


class ConsistentHash(OneByOne):
    """Trajectories and engines are points on a ring; a step goes to the next accepting engine.

    Each engine has `points_per_engine` points on the ring, which evens out the shares: they spread
    by about 1/sqrt(points_per_engine). An engine that no longer accepts work is skipped, so that
    only its share moves. A new engine takes only its own share.
    """

    def __init__(self, points_per_engine: int = 128) -> None:
        if points_per_engine < 1:
            raise ValueError(f"points_per_engine is {points_per_engine}; give at least 1")
        self._points_per_engine = points_per_engine
        self._ring: list[tuple[int, EngineId]] = []
        self._on_ring: dict[EngineId, None] = {}

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the first accepting engine at or after the trajectory's point."""
        # Engines join at the end: if the last is on the ring, all are.
        if view.engines[-1].id not in self._on_ring:
            self._rebuild(view)
        ring = self._ring
        i = bisect_left(ring, (_point(t.id), "")) % len(ring)
        while not view.engine(
            ring[i][1]
        ).accepting:  # ends: every engine of the view is on the ring
            i = (i + 1) % len(ring)
        return ring[i][1]

    def _rebuild(self, view: View) -> None:
        """Add new engines, drop those that are gone; all other points stay where they are."""
        ring = [point for point in self._ring if view.engine(point[1]).accepting]
        for engine in view.engines:
            if engine.id not in self._on_ring:
                ring += [
                    (_point(f"{engine.id}#{i}"), engine.id) for i in range(self._points_per_engine)
                ]
        ring.sort()
        self._ring = ring
        self._on_ring = {engine.id: None for engine in view.engines}
