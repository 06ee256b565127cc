"""The calls that a simulation has scheduled, in the order in which they are due.

A run has a call under way for every tool and every engine. One heap of them all costs a comparison
with cold memory per level; so only the calls of the nearest `BUCKET_S` are in a heap, and later
ones in unordered buckets of that length.
"""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
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
        """Heap of the calls of `_bucket` and of those before it."""
        self._bucket = 0
        self._far: dict[int, list[_Call]] = {}
        """Later calls by bucket."""
        self._far_buckets: list[int] = []
        """Heap of the keys of `_far`."""

    def call_at(self, time_s: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act` at `time_s`, or now if that is past."""
        if not time_s > self.now_s:
            time_s = self.now_s
        call = (time_s, next(self.numbers), act, args)
        bucket = int(time_s / BUCKET_S) if time_s < 1e15 else LAST_BUCKET
        if bucket <= self._bucket:
            heappush(self._near, call)
        elif bucket in self._far:
            self._far[bucket].append(call)
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
        if self._near or self._advance():
            first = self._near[0]
            return first[0], first[1]
        return inf, 0

    def step(self) -> None:
        """Make the next call. There must be one."""
        time_s, _, act, args = heappop(self._near)
        self.now_s = time_s
        act(*args)

    def run(self, stop: Sequence[object] = ()) -> None:
        """Make calls before `limit_s` until `stop` has an item or none is left."""
        while not stop:
            if not (self._near or self._advance()):
                return
            near = self._near
            if near[0][0] >= self.limit_s:
                return
            time_s, _, act, args = heappop(near)
            self.now_s = time_s
            act(*args)

    def _advance(self) -> bool:
        """Make the calls of the next bucket the near ones; return whether there were any."""
        if not self._far_buckets:
            return False
        self._bucket = heappop(self._far_buckets)
        self._near = self._far.pop(self._bucket)
        heapify(self._near)
        return True
