"""The run's clock: seconds since the rollout began, and calls scheduled at such times.

It is not the event loop's clock. It can run faster, and it can stop. Frameworks keep engines
between rollouts, so the start of the first engines takes no time of the run: the clock stops.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any


@dataclass(frozen=True, slots=True)
class Lateness:
    """How late a clock made its calls, in seconds of that clock."""

    calls: int = 0
    """Calls made while time went on."""
    largest_s: float = 0.0
    total_s: float = 0.0
    """The sum over all calls."""

    @property
    def mean_s(self) -> float:
        """The mean over all calls; 0 without any."""
        return self.total_s / self.calls if self.calls else 0.0


class RunClock:
    """Seconds of one run; implements `Clock`. Calls at equal times keep the order of requests.

    The event loop does not order equal timers, and journals are compared with the simulator's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, speed: float = 1.0) -> None:
        """`speed`: seconds of this clock that pass in one of the event loop's."""
        self._loop, self._speed = loop, speed
        self._origin_s = loop.time()
        self._frozen_s: float | None = 0.0
        self._calls: list[tuple[float, int, float, Callable[..., None], tuple[Any, ...]]] = []
        """Time, number, when it is due, and the call: one for a past time is due at its request."""
        self._requests = 0
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        """Time of the current call: a timer may be late, but its call counts at its own time."""
        self._made, self._late_s, self._latest_s = 0, 0.0, 0.0
        """Calls made while time went on, the sum of their lateness, and the largest."""

    @property
    def speed(self) -> float:
        """Seconds of this clock that pass in one of the event loop's."""
        return self._speed

    @property
    def now_s(self) -> float:
        if self._frozen_s is not None:
            return self._frozen_s
        return max((self._loop.time() - self._origin_s) * self._speed, self._due_s)

    @property
    def frozen(self) -> bool:
        return self._frozen_s is not None

    @property
    def lateness(self) -> Lateness:
        """Of all calls so far: from when each was due to when it was made."""
        return Lateness(self._made, self._latest_s, self._late_s)

    def freeze(self) -> None:
        """Stop time; only calls due at this time still run."""
        if self._frozen_s is None:
            self._frozen_s = self.now_s
            self._arm()

    def thaw(self) -> None:
        """Continue from where it stopped; it begins frozen, at 0."""
        if self._frozen_s is not None:
            self._origin_s = self._loop.time() - self._frozen_s / self._speed
            self._frozen_s = None
            self._arm()

    def call_after(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        self.call_at(self.now_s + delay_s, act, *args)

    def call_at(self, time_s: float, act: Callable[..., None], *args: Any) -> None:
        self._requests += 1
        due_s = max(time_s, self.now_s)
        heappush(self._calls, (time_s, self._requests, due_s, act, args))
        if self._calls[0][1] == self._requests:
            self._arm()

    async def sleep(self, delay_s: float) -> None:
        over = asyncio.Event()
        self.call_after(delay_s, over.set)
        await over.wait()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._calls:
            return
        due_s = self._calls[0][0]
        if self._frozen_s is None:
            self._timer = self._loop.call_at(self._origin_s + due_s / self._speed, self._on_timer)
        elif due_s <= self._frozen_s:
            self._timer = self._loop.call_at(self._loop.time(), self._on_timer)

    def _on_timer(self) -> None:
        """Make one call; the loop may process its effects before the next."""
        self._timer = None
        time_s, _, due_s, act, args = heappop(self._calls)
        self._due_s = max(self._due_s, time_s)
        if self._frozen_s is None:
            late_s = self.now_s - due_s
            self._made += 1
            self._late_s += late_s
            self._latest_s = max(self._latest_s, late_s)
        self._arm()
        act(*args)
