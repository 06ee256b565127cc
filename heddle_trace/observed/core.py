"""What formats of measured steps share: their interface, and records grouped by trajectory."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeVar

from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.sessions import Sessions
from heddle_trace.importers.sources import SourceFile
from heddle_trace.observed.schema import Clock, Observation, ObservedHeader

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ParsedObservation:
    """An observation and its place in the source, for messages."""

    where: str
    seen: Observation | ObservedHeader


Observations: TypeAlias = Iterator[ParsedObservation]


class ObservedFormat(ABC):
    """One format. Its module cites the description of the format."""

    clock: ClassVar[Clock] = "shared"
    """Of its requests."""
    one_file: ClassVar[bool] = False
    """Whether each file is a run of its own, with a clock of its own."""

    @abstractmethod
    def recognises(self, head: Head) -> bool:
        """Whether a file that begins like this is of the format. Never raises."""

    @abstractmethod
    def observations(self, sources: Sequence[SourceFile], notes: Notes) -> Observations:
        """All observations, read as a stream; requests of a trajectory in order.

        Damaged records go through `notes.guard`. Raises TraceError for a file as a whole.
        """


def number_in(text: str) -> float:
    """A number. Raises DamagedError for what is none."""
    with suppress(ValueError):
        return float(text)
    raise DamagedError(f"{text[:40]!r} is no number")


def grouped(
    kind: type[T], rows: Iterable[tuple[str, str, T]]
) -> Iterator[tuple[str, list[tuple[str, T]]]]:
    """Rows, each with its trajectory and its place, by trajectory; memory does not grow."""
    part: Any = tuple[str, kind]  # type: ignore[valid-type]
    with Sessions(part) as sessions:
        for trajectory, where, row in rows:
            sessions.add(trajectory, (where, row))
        yield from sessions
