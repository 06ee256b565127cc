"""The calls that a simulation has scheduled, in the order in which they are due.

A run has a call under way for every tool and every engine. One heap of them all costs a comparison
with cold memory per level; so only calls of the nearest `BUCKET_S` are in order: a sorted list of
those known as it began, and a heap of those added since. Later ones are in unordered buckets.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any, Final, TypeAlias

BUCKET_S: Final = 0.05
LAST_BUCKET: Final = 1 << 60
"""The bucket of calls at times too large to count, such as infinity."""

_Call: TypeAlias = tuple[float, int, Callable[..., None], tuple[Any, ...]]


class Calendar:
    """Simulated time and the calls scheduled in it; implements `Clock`.

    Calls at the same time run in the order of their requests. While the clock is frozen, engines
    start in no time; freezing has no other effect.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        """Seconds since the run began."""
        self.frozen = False
        self.numbers = count()
        """Numbers of requests. A SimPy environment that shares this time draws from them too."""
        self.limit_s = inf
        """`run` leaves calls from this time on to its caller."""
        self._near: list[_Call] = []
        """Calls that `_bucket` had at its begin, the next one last."""
        self._added: list[_Call] = []
        """Heap of those that were added to it since, or to buckets before it."""
        self._bucket = 0
        self._far: dict[int, list[_Call]] = {}
        """Later calls by bucket."""
        self._far_buckets: list[int] = []
        """Heap of the keys of `_far`."""

    def call_at(self, time_s: float, act: Callable[..., None], *args: Any) -> None:
        if not time_s > self.now_s:
            time_s = self.now_s
        call = (time_s, next(self.numbers), act, args)
        bucket = int(time_s / BUCKET_S) if time_s < 1e15 else LAST_BUCKET
        if bucket <= self._bucket:
            heappush(self._added, call)
        elif (far := self._far.get(bucket)) is not None:
            far.append(call)
        else:
            self._far[bucket] = [call]
            heappush(self._far_buckets, bucket)

    def call_after(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act` once `delay_s` have passed.

        Raises:
            ValueError: a negative delay.
        """
        if not delay_s >= 0.0:
            raise ValueError(f"a call cannot be delayed by {delay_s} s")
        self.call_at(self.now_s + delay_s, act, *args)

    def freeze(self) -> None:
        """Make engine starts take no time."""
        self.frozen = True

    def thaw(self) -> None:
        """Make engine starts take time again."""
        self.frozen = False

    def peek(self) -> tuple[float, int]:
        """Time and number of the next call; infinite when there is none."""
        if not (self._near or self._added or self._advance()):
            return inf, 0
        return min([*self._near[-1:], *self._added[:1]])[:2]

    def step(self) -> None:
        """Make the next call. There must be one."""
        near, added = self._near, self._added
        from_added = added and not (near and near[-1] < added[0])
        time_s, _, act, args = heappop(added) if from_added else near.pop()
        self.now_s = time_s
        act(*args)

    def run(self, stop: Sequence[object] = ()) -> None:
        """Make calls before `limit_s` until `stop` has an item or none is left."""
        added = self._added
        while not stop and (self._near or added or self._advance()):
            near = self._near
            from_added = added and not (near and near[-1] < added[0])
            call = added[0] if from_added else near[-1]
            time_s = call[0]
            if time_s >= self.limit_s:
                return
            if from_added:
                heappop(added)
            else:
                near.pop()
            self.now_s = time_s
            call[2](*call[3])

    def _advance(self) -> bool:
        """Make the calls of the next bucket the near ones; return whether there were any."""
        if not self._far_buckets:
            return False
        self._bucket = heappop(self._far_buckets)
        self._near = self._far.pop(self._bucket)
        self._near.sort(reverse=True)
        return True
