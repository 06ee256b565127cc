"""The interface of a format: it recognises files and reads records from them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import Notes
from heddle_trace.importers.sources import SourceFile
from heddle_trace.importers.tokens import Counter
from heddle_trace.schema import TrajectoryRecord


@dataclass(frozen=True, slots=True)
class ParsedRecord:
    """A record and its place in the source, for later messages."""

    where: str
    record: TrajectoryRecord


@dataclass(frozen=True, slots=True)
class ImportContext:
    """What an importer needs: counts of the import, a token counter, the user's options."""

    notes: Notes
    tokens: Counter
    workload: str | None = None
    """Replaces the format's own name of the workload."""

    def workload_or(self, usual: str) -> str:
        return self.workload or usual


Records: TypeAlias = Iterator[ParsedRecord]


class Importer(Protocol):
    """One format. Its module cites the description of the format."""

    @property
    def assumes(self) -> tuple[str, ...]:
        """Assumptions of every import of the format, shown beside its counts."""
        ...

    def recognises(self, head: Head) -> bool:
        """Whether a file that begins like this is of the format. Never raises."""
        ...

    def records(self, sources: Sequence[SourceFile], context: ImportContext) -> Records:
        """The records of all files, read as a stream.

        Damaged records go through `context.notes.guard`. Raises TraceError for a file as a whole.
        """
        ...
