"""What a format is to the rest: something that recognises a file, and reads records from it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import Notes
from heddle_trace.importers.sources import Source
from heddle_trace.importers.tokens import Counter
from heddle_trace.schema import TrajectoryRecord


@dataclass(frozen=True, slots=True)
class Found:
    """A record, and where it comes from, for what is yet to be said about it."""

    where: str
    record: TrajectoryRecord


@dataclass(frozen=True, slots=True)
class Desk:
    """What a format works with: who counts tokens, where to note things, what was asked for."""

    notes: Notes
    tokens: Counter
    workload: str | None = None
    """Replaces the workload that a format would give its records."""

    def workload_or(self, usual: str) -> str:
        """The workload of a record."""
        return self.workload or usual


class Importer(Protocol):
    """One format. Its module says where the format is described."""

    @property
    def assumes(self) -> tuple[str, ...]:
        """What holds for every import of the format; shown beside its counts."""
        ...

    def recognises(self, head: Head) -> bool:
        """Whether a file that begins like this is of the format. Never raises."""
        ...

    def records(self, sources: Sequence[Source], desk: Desk) -> Iterator[Found]:
        """The records of all files, read as a stream.

        What is damaged goes through `desk.notes.guard`. Raises TraceError for a file as a whole.
        """
        ...
