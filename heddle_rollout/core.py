"""The core as the driver uses it."""

from collections.abc import Sequence
from typing import Protocol

from mypy_extensions import mypyc_attr

from heddle_core.commands import Command
from heddle_core.events import Event
from heddle_core.journal import Sink, recorded


class Core(Protocol):
    """Turns events into commands; implemented by `heddle_core.Controller`."""

    @property
    def deadline_s(self) -> float | None:
        """The driver delivers a `Tick` no later than this."""
        ...

    def handle(self, event: Event) -> Sequence[Command]:
        """Take one event in; return the commands it causes."""
        ...


@mypyc_attr(allow_interpreted_subclasses=True)
class RecordedCore:
    """A core that also passes all events and commands to `sink`."""

    def __init__(self, core: Core, sink: Sink) -> None:
        self.handle = recorded(core.handle, sink)
        self._core = core

    @property
    def deadline_s(self) -> float | None:
        return self._core.deadline_s
