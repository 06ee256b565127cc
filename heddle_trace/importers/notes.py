"""What an import says about itself: what it read, left out, assumed, and found damaged."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from heddle_trace.errors import TraceError

SKIP_REMEDY: Final = "mend it, or leave such records out with --skip-bad"
_SHOWN = 20

_LIMITS: Final[Mapping[type[BaseException], str]] = {
    RecursionError: "is nested too deeply",
    OverflowError: "holds a number that is too large",
}
"""What a record can run into wherever it is looked at, and what that says of the record."""


class DamagedError(Exception):
    """A record that cannot be kept. The message says what is wrong with it, not where."""


@dataclass(slots=True)
class Notes:
    """Counts of one import, each under the words that a user reads.

    `read` counts what the files hold: lines, items of a document, or members of an archive.
    `line` is the line that is being read, and `suspect` says what else a damaged one looks like.
    """

    skip_bad: bool = False
    read: int = 0
    damaged: int = 0
    first_damaged: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    assumed: dict[str, int] = field(default_factory=dict)
    line: bytes = b""
    suspect: Callable[[bytes], str] = field(default=lambda line: "")

    def drop(self, what: str, count: int = 1) -> None:
        """Count something that is left out on purpose."""
        self.dropped[what] = self.dropped.get(what, 0) + count

    def assume(self, what: str, count: int = 1) -> None:
        """Count something that the source does not say and that was taken to be so."""
        self.assumed[what] = self.assumed.get(what, 0) + count

    def guard(self, where: str) -> "Guard":
        """Deal with a record: where it is damaged, stop the import, or count it and go on.

        A context manager. Raises TraceError for a damaged record unless those are to be skipped.
        """
        return Guard(self, where)

    def damage(self, where: str, what: str) -> None:
        """Count a damaged record. Raises TraceError unless those are to be skipped."""
        if self.line:
            what += self.suspect(self.line)
        if not self.skip_bad:
            raise TraceError(f"{where}: {what}; {SKIP_REMEDY}") from None
        self.damaged += 1
        if len(self.first_damaged) < _SHOWN:
            self.first_damaged.append(f"{where}: {what}")


class Guard:
    """See `Notes.guard`. A class, since a line passes through several of them."""

    __slots__ = ("_notes", "_where")

    def __init__(self, notes: Notes, where: str) -> None:
        self._notes = notes
        self._where = where

    def __enter__(self) -> None:
        """Begin a record."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        """Take damage; let everything else through."""
        if error is None or not isinstance(error, (DamagedError, *_LIMITS)):
            return False
        self._notes.damage(self._where, _LIMITS.get(type(error)) or str(error))
        return True
