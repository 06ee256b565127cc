"""Simulated time as the driver's clock, and simulated time that follows another clock."""

from collections.abc import Callable
from typing import Any

import simpy
from simpy.events import NORMAL, Event, EventPriority

from heddle_rollout.clock import Clock


class SimClock(simpy.Environment):
    """A SimPy environment as a clock; implements `Clock`.

    While it is frozen, engines start in no time; freezing has no other effect.
    """

    def __init__(self) -> None:
        super().__init__(0.0)
        self.frozen = False

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return self._now

    def call_at(self, time_s: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act` at `time_s`, or now if that is past."""
        self.call_after(max(0.0, time_s - self._now), act, *args)

    def call_after(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act` once `delay_s` have passed."""
        self.schedule(_Call(act, args), delay=delay_s)

    def freeze(self) -> None:
        """Make engine starts take no time."""
        self.frozen = True

    def thaw(self) -> None:
        """Make engine starts take time again."""
        self.frozen = False


class _Call(Event):
    """A scheduled call: an event with only the fields that SimPy needs, since a run makes many."""

    def __init__(self, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.callbacks = [_make]
        self._ok, self._value = True, None
        self.act, self.args = act, args


def _make(call: Any) -> None:
    call.act(*call.args)


class FollowingEnvironment(simpy.Environment):
    """Simulated time that follows another clock, as in a dry run on the event loop.

    An event that the clock delivers late is still processed at its own time.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._due_s: float | None = None
        """Time of the earliest call scheduled on the clock."""
        self._stepping = False

    def follow(self) -> None:
        """Advance to the clock's time, or to the next event if that is earlier."""
        if not self._stepping:
            self._now = max(self._now, min(self._clock.now_s, self.peek()))

    def schedule(self, event: Event, priority: EventPriority = NORMAL, delay: float = 0.0) -> None:
        """Schedule an event, and a call of the clock at its time."""
        super().schedule(event, priority, delay)
        if not self._stepping:
            self._arm()

    def _arm(self) -> None:
        due_s = self.peek()
        if due_s != float("inf") and (self._due_s is None or due_s < self._due_s):
            self._due_s = due_s
            self._clock.call_at(due_s, self._on_due, due_s)

    def _on_due(self, due_s: float) -> None:
        if due_s == self._due_s:
            self._due_s = None
        self._stepping = True
        try:
            while self.peek() <= self._clock.now_s:
                self.step()
        finally:
            self._stepping = False
        self._arm()
