"""Requests that keep their KV blocks after a step, for a tool call that is over soon.

The prefix cache alone keeps whole blocks, as long as nobody needs the room. A pinned request keeps
everything until its time is up, and the next step computes only what the tool has added. Where
anything waits for room, nothing is pinned.
"""

from typing import NamedTuple

from heddle_runtime.process.engine_core import Core


class _Pinned(NamedTuple):
    request: str
    context: list[int]
    until_s: float


class Sessions:
    """At most one pinned request for each trajectory."""

    def __init__(self, core: Core, pin_s: float) -> None:
        """`pin_s` 0: none at all."""
        self._core, self._pin_s = core, pin_s
        self._pinned: dict[str, _Pinned] = {}

    @property
    def on(self) -> bool:
        """Whether steps are to be pinned."""
        return self._pin_s > 0

    @property
    def any(self) -> bool:
        """Whether anything is pinned now."""
        return bool(self._pinned)

    def keep(self, trajectory: str, request: str, context: list[int], now_s: float) -> None:
        """Note that a step's request has ended with this context and holds its blocks."""
        self._pinned[trajectory] = _Pinned(request, context, now_s + self._pin_s)

    def take(self, trajectory: str, context: list[int]) -> tuple[str, int]:
        """Return the request that a step can go on with, and how many tokens it has KV of.

        The empty name where there is none: a context that does not continue the pinned one lets go
        of it.
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
        """Let go of what is pinned for a trajectory, if anything is."""
        pinned = self._pinned.pop(trajectory, None)
        if pinned is not None:
            self._core.abort(pinned.request)

    def tidy(self, now_s: float) -> None:
        """Let go of what has been pinned long enough, and of all where room is short."""
        crowded = bool(self._pinned) and self._core.counters()[1] > 0
        for trajectory, pinned in list(self._pinned.items()):
            if crowded or now_s >= pinned.until_s:
                self.drop(trajectory)

    def clear(self) -> None:
        """Let go of everything."""
        for trajectory in list(self._pinned):
            self.drop(trajectory)
