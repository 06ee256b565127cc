"""An event loop with virtual time: when all tasks wait, the clock jumps to the next timer.

Asyncio code that takes hours runs in milliseconds, with the same result each time. This makes
drivers testable and fake runs quick. Real I/O works, but takes no virtual time.
"""

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NoWait(selectors.SelectSelector):
    """A selector that never waits for a timer: the loop jumps to it."""

    loop: "VirtualTimeLoop | None" = None

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout and self.loop is not None:
            self.loop.jump()
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop that begins at 0 and jumps from timer to timer, one instant at a time."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _NoWait()
        super().__init__(selector)
        selector.loop = self

    @property
    def _clock_resolution(self) -> float:
        """Resolution within which the base class runs timers together: here only equal times."""
        return math.ulp(self.now)

    @_clock_resolution.setter
    def _clock_resolution(self, value: float) -> None:
        """Ignore the resolution that the base class measures."""

    def time(self) -> float:
        return self.now

    def jump(self) -> None:
        """Go to the next timer."""
        timers = self._scheduled  # type: ignore[attr-defined]
        if timers:
            self.now = max(self.now, float(timers[0].when()))


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
