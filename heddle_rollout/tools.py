"""Tools in simulated time: calls with recorded latency, at most `capacity` of them at once."""

from collections import deque
from collections.abc import Callable
from functools import partial

import simpy


class ToolPool:
    """Runs tool calls; with a finite `capacity` the rest wait in order of arrival."""

    def __init__(self, env: simpy.Environment, capacity: int | None) -> None:
        """`capacity` None: as many as asked for run at once.

        Raises:
            ValueError: a capacity below 1.
        """
        if capacity is not None and capacity < 1:
            raise ValueError(f"tool capacity must be 1 or more, or none for no limit: {capacity}")
        self.running = 0
        """Calls that run now."""
        self.queued_s = 0.0
        """Seconds that calls waited for a place, summed over those that got one."""
        self._env = env
        self._capacity = capacity
        self._waiting: deque[tuple[float, float, Callable[[], None]]] = deque()

    @property
    def waiting(self) -> int:
        """Calls that wait for a place."""
        return len(self._waiting)

    def run(self, seconds: float, callback: Callable[[], None]) -> None:
        """Run a call of `seconds`, when it has a place; `callback` is called at its end.

        Raises:
            ValueError: negative or not-a-number seconds.
        """
        if not seconds >= 0.0:
            raise ValueError(f"a tool call cannot take {seconds} s")
        if self._capacity is not None and self.running >= self._capacity:
            self._waiting.append((self._env.now, seconds, callback))
        else:
            self._begin(seconds, callback)

    def _begin(self, seconds: float, callback: Callable[[], None]) -> None:
        self.running += 1
        callbacks = self._env.timeout(seconds).callbacks
        assert callbacks is not None
        callbacks.append(partial(self._end, callback))

    def _end(self, callback: Callable[[], None], _: simpy.Event) -> None:
        self.running -= 1
        # The place goes to who waits before the caller can ask for another.
        if self._waiting:
            since_s, seconds, waiting = self._waiting.popleft()
            self.queued_s += self._env.now - since_s
            self._begin(seconds, waiting)
        callback()
