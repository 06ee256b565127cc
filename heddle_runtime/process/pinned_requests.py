"""Requests that keep their KV blocks after a step, during a short tool call.

The prefix cache keeps whole blocks, and only until other requests need them. A pinned request keeps
all of its blocks until its time is over, and the next step computes only the tool's output. While
requests wait for KV space, nothing is pinned.
"""

from typing import NamedTuple

from heddle_runtime.process.stepped_engine import SteppedEngine


class _Pinned(NamedTuple):
    request: str
    context: list[int]
    until_s: float


class PinnedRequests:
    """At most one pinned request for each trajectory."""

    def __init__(self, core: SteppedEngine, pin_s: float) -> None:
        """`pin_s` 0: pin nothing."""
        self._core, self._pin_s = core, pin_s
        self._pinned: dict[str, _Pinned] = {}

    @property
    def on(self) -> bool:
        """Whether requests are pinned after a step."""
        return self._pin_s > 0

    @property
    def any(self) -> bool:
        """Whether anything is pinned now."""
        return bool(self._pinned)

    def keep(self, trajectory: str, request: str, context: list[int], now_s: float) -> None:
        """Pin a request that has ended with this context."""
        self._pinned[trajectory] = _Pinned(request, context, now_s + self._pin_s)

    def take(self, trajectory: str, context: list[int]) -> tuple[str, int]:
        """Return the pinned request that a step continues, and for how many tokens it has KV.

        The name is empty if there is none. A context that does not continue the pinned one drops
        it.
        """
        pinned = self._pinned.get(trajectory)
        if pinned is None:
            return "", 0
        if context[: len(pinned.context)] != pinned.context:
            self.drop(trajectory)
            return "", 0
        del self._pinned[trajectory]
        return pinned.request, len(pinned.context) - 1  # the last token was never computed

    def drop(self, trajectory: str) -> None:
        """Drop the pinned request of a trajectory, if there is one."""
        pinned = self._pinned.pop(trajectory, None)
        if pinned is not None:
            self._core.abort(pinned.request)

    def tidy(self, now_s: float) -> None:
        """Drop requests whose time is over, or all of them while requests wait for KV space."""
        queueing = bool(self._pinned) and self._core.counters()[1] > 0
        for trajectory, pinned in list(self._pinned.items()):
            if queueing or now_s >= pinned.until_s:
                self.drop(trajectory)

    def clear(self) -> None:
        for trajectory in list(self._pinned):
            self.drop(trajectory)
