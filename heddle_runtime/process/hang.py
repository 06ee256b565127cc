"""Notices that a process has hung: it is silent, and does not compute.

A process that works sends messages, heartbeats among them, from its own loop. One that compiles or
loads is silent for minutes, but uses CPU time; a stopped one, or one that waits for a lost peer,
does not.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from heddle_runtime.process.child import ChildProcess

LOOKS = 4
"""Looks in the time after which a silent process has hung. They are counted, not the time between
them: after a pause of this process itself, the messages that came meanwhile are read before the
next look."""
LEAST_CPU_SHARE = 0.01
"""Of a CPU. Threads that poll, such as NCCL's watchdog, take less while nothing computes."""


class HangWatch:
    """Calls `on_hang` once, with the reason; made inside a running event loop."""

    def __init__(
        self,
        process: ChildProcess[Any],
        *,
        hang_s: float,
        busy_limit_s: float,
        on_hang: Callable[[str], None],
    ) -> None:
        """A process has hung that is silent for `hang_s` and does not compute meanwhile.

        One that computes may be silent for `busy_limit_s`.
        """
        self._process, self._on_hang = process, on_hang
        self._hang_s, self._busy_limit_s = hang_s, busy_limit_s
        self._loop = asyncio.get_running_loop()
        self._silent = 0
        """Looks since the last message."""
        self._cpu_s = 0.0
        """CPU time at the first look, and at every `LOOKS`-th one since."""
        self._timer = self._loop.call_later(hang_s / LOOKS, self._look)

    def received(self) -> None:
        self._silent = 0

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._hang_s / LOOKS, self._look)
        self._silent += 1
        if self._silent % LOOKS != 1:
            return
        before_s, self._cpu_s = self._cpu_s, self._process.cpu_s()
        if self._silent == 1:
            return
        silent_s = (self._silent - 1) * self._hang_s / LOOKS
        if self._process.stopped():
            self._hung(f"it has hung: no message for {silent_s:g} s, and a signal has stopped it")
        elif self._cpu_s - before_s < LEAST_CPU_SHARE * self._hang_s:
            self._hung(f"it has hung: no message for {silent_s:g} s, and it does not compute")
        elif silent_s >= self._busy_limit_s:
            self._hung(f"it has hung: it computes, but no message came for {silent_s:g} s")

    def _hung(self, reason: str) -> None:
        self.close()
        self._on_hang(reason)
