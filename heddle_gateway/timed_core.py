"""How long decisions of the core take."""

import time
from collections.abc import Callable, Sequence

from heddle_core.commands import Command
from heddle_core.events import Event
from heddle_rollout.core import Core


class TimedCore:
    """A core whose decisions are timed."""

    def __init__(self, core: Core, took: Callable[[float], None]) -> None:
        """`took` gets the seconds of each decision."""
        self._core, self._took = core, took

    def handle(self, event: Event) -> Sequence[Command]:
        began_s = time.perf_counter()
        commands = self._core.handle(event)
        self._took(time.perf_counter() - began_s)
        return commands

    @property
    def deadline_s(self) -> float | None:
        return self._core.deadline_s
