"""The interface of a format of measured steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import Notes
from heddle_trace.importers.sources import SourceFile
from heddle_trace.observed.schema import Clock, Observation


@dataclass(frozen=True, slots=True)
class Placed:
    """An observation and its place in the source, for messages."""

    where: str
    seen: Observation


Observations: TypeAlias = Iterator[Placed]


class ObservedFormat(Protocol):
    """One format. Its module cites the description of the format."""

    @property
    def clock(self) -> Clock:
        """Of its requests."""
        ...

    @property
    def one_file(self) -> bool:
        """Whether each file is a run of its own, with a clock of its own."""
        ...

    def recognises(self, head: Head) -> bool:
        """Whether a file that begins like this is of the format. Never raises."""
        ...

    def observations(self, sources: Sequence[SourceFile], notes: Notes) -> Observations:
        """All observations, read as a stream; requests of a trajectory in order.

        Damaged records go through `notes.guard`. Raises TraceError for a file as a whole.
        """
        ...
