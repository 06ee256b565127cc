"""Counts of an import: what it read, left out, assumed, and found damaged."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from heddle_trace.errors import TraceError

SKIP_REMEDY: Final = "mend it, or leave such records out with --set logs.skip_bad=true"
_SHOWN = 20

_LIMITS: Final[Mapping[type[BaseException], str]] = {
    RecursionError: "is nested too deeply",
    OverflowError: "holds a number that is too large",
}
"""Errors that any access to a record can raise, and their meaning for the record."""


class DamagedError(Exception):
    """A record that cannot be kept. The message names the fault, not the place."""


@dataclass(slots=True)
class Notes:
    """Counts of one import, each under the text that a user reads.

    `read` counts what the files hold: lines, items of a document, or members of an archive.
    `line` is the current line; `suspect` returns which other format a damaged line has.
    """

    skip_bad: bool = False
    read: int = 0
    damaged: int = 0
    first_damaged: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    assumed: dict[str, int] = field(default_factory=dict)
    line: bytes = b""
    suspect: Callable[[bytes], str] = field(default=lambda line: "")

    def drop(self, what: str) -> None:
        """Count something that is left out on purpose."""
        self.dropped[what] = self.dropped.get(what, 0) + 1

    def assume(self, what: str, count: int = 1) -> None:
        """Count an assumption about what the source does not record."""
        self.assumed[what] = self.assumed.get(what, 0) + count

    def guard(self, where: str) -> "BadRecordPolicy":
        """Apply the policy for bad records: stop the import, or count the record and continue.

        A context manager. Raises TraceError for a damaged record unless they are skipped.
        """
        return BadRecordPolicy(self, where)

    def damage(self, where: str, what: str) -> None:
        """Count a damaged record. Raises TraceError unless they are skipped."""
        if self.line:
            what += self.suspect(self.line)
        if not self.skip_bad:
            raise TraceError(f"{where}: {what}; {SKIP_REMEDY}") from None
        self.damaged += 1
        if len(self.first_damaged) < _SHOWN:
            self.first_damaged.append(f"{where}: {what}")


class BadRecordPolicy:
    """See `Notes.guard`. A class, not a generator, because it runs several times for each line."""

    __slots__ = ("_notes", "_where")

    def __init__(self, notes: Notes, where: str) -> None:
        self._notes = notes
        self._where = where

    def __enter__(self) -> None:
        """Begin a record."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        """Handle damage; raise everything else."""
        if error is None or not isinstance(error, (DamagedError, *_LIMITS)):
            return False
        self._notes.damage(self._where, _LIMITS.get(type(error)) or str(error))
        return True
