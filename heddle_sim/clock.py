"""Simulated time as a SimPy environment, and simulated time that follows another clock."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import simpy
from simpy.events import NORMAL, Event, EventPriority

from heddle_rollout.clock import Clock
from heddle_sim.calendar import Calendar


class SimEnvironment(simpy.Environment):
    """A SimPy environment whose time is a calendar's; processes of a user run in it.

    The simulation's own calls are in the calendar, which is quicker than SimPy's events. Calls and
    events at the same time run in the order of their requests, urgent events first.
    """

    def __init__(self) -> None:
        self.calendar = Calendar()
        super().__init__(self.calendar.now_s)
        self._eid = self.calendar.numbers

    @property
    def _now(self) -> float:
        return self.calendar.now_s

    @_now.setter
    def _now(self, time_s: float) -> None:
        self.calendar.now_s = time_s

    def schedule(self, event: Event, priority: EventPriority = NORMAL, delay: float = 0.0) -> None:
        super().schedule(event, priority, delay)
        self.calendar.limit_s = super().peek()

    def peek(self) -> float:
        """Time of the next call or event; infinite when there is none."""
        return min(super().peek(), self.calendar.peek()[0])

    def step(self) -> None:
        """Make the next call of the calendar, or process the next event of SimPy.

        Raises:
            EmptySchedule: there is neither.
        """
        time_s, number = self.calendar.peek()
        if time_s < inf and (not self._queue or (time_s, NORMAL, number) < self._queue[0][:3]):
            self.calendar.step()
            return
        try:
            super().step()
        finally:
            self.calendar.limit_s = super().peek()

    def run_until(self, stop: Sequence[object]) -> None:
        """Make calls and process events until `stop` has an item.

        Raises:
            EmptySchedule: there is neither any more.
        """
        while not stop:
            self.calendar.run(stop)
            if not stop:
                self.step()


class FollowingClock:
    """Simulated time that follows another clock, as in a dry run on the event loop.

    Implements `Clock`. A call that the other clock makes late still counts at its own time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._calendar = Calendar()
        self._due_s = inf
        """Time of the earliest call scheduled on the other clock."""
        self._stepping = False

    @property
    def now_s(self) -> float:
        """Simulated seconds; see `follow`."""
        return self._calendar.now_s

    @property
    def frozen(self) -> bool:
        return self._clock.frozen

    def freeze(self) -> None:
        self._clock.freeze()

    def thaw(self) -> None:
        self._clock.thaw()

    def follow(self) -> None:
        """Advance to the other clock's time, or to the next call if that is earlier."""
        if not self._stepping:
            calendar = self._calendar
            now_s = min(self._clock.now_s, calendar.peek()[0])
            calendar.now_s = max(calendar.now_s, now_s)

    def call_at(self, time_s: float, act: Callable[..., None], *args: Any) -> None:
        self._calendar.call_at(time_s, act, *args)
        self._arm()

    def call_after(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        self._calendar.call_after(delay_s, act, *args)
        self._arm()

    def _arm(self) -> None:
        if self._stepping:
            return
        due_s = self._calendar.peek()[0]
        if due_s < self._due_s:
            self._due_s = due_s
            self._clock.call_at(due_s, self._on_due, due_s)

    def _on_due(self, due_s: float) -> None:
        if due_s == self._due_s:
            self._due_s = inf
        self._stepping = True
        try:
            while self._calendar.peek()[0] <= self._clock.now_s:
                self._calendar.step()
        finally:
            self._stepping = False
        self._arm()
