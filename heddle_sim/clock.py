"""Simulated time as the driver's clock, and as engines see it under another clock."""

from collections.abc import Callable
from typing import Any

import simpy
from simpy.events import NORMAL, Event, EventPriority

from heddle_rollout.clock import Clock


class SimClock(simpy.Environment):
    """A SimPy environment as a clock; implements `Clock`.

    While it is frozen, engines start in no time: that is all that freezing means here.
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
        """Let engines start in no time."""
        self.frozen = True

    def thaw(self) -> None:
        """Let engines take their time again."""
        self.frozen = False


class _Call(Event):
    """A call that is due: what SimPy needs of an event and no more, since a run makes many."""

    def __init__(self, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.callbacks = [_make]
        self._ok, self._value = True, None
        self.act, self.args = act, args


def _make(call: Any) -> None:
    call.act(*call.args)


class FollowingEnvironment(simpy.Environment):
    """Simulated time that follows another clock, as in a dry run on the event loop.

    An event that is processed late, because the clock was, still happens at its own moment.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._due_s: float | None = None
        """Of the earliest call that the clock has promised."""
        self._stepping = False

    def follow(self) -> None:
        """Let it be as late as it is by the clock, or as the next event allows."""
        if not self._stepping:
            self._now = max(self._now, min(self._clock.now_s, self.peek()))

    def schedule(self, event: Event, priority: EventPriority = NORMAL, delay: float = 0.0) -> None:
        """Schedule an event, and a call of the clock for when it is due."""
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
