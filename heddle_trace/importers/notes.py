"""What an import says about itself: what it read, left out, assumed, and found damaged."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from heddle_trace.errors import TraceError

SKIP_REMEDY: Final = "mend it, or leave such records out with --skip-bad"
_SHOWN = 20


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

    @contextmanager
    def guard(self, where: str) -> Iterator[None]:
        """Deal with a record: where it is damaged, stop the import, or count it and go on.

        Raises TraceError for a damaged record unless those are to be skipped.
        """
        try:
            yield
        except DamagedError as damage:
            error = f"{damage}{self.suspect(self.line) if self.line else ''}"
            if not self.skip_bad:
                raise TraceError(f"{where}: {error}; {SKIP_REMEDY}") from None
            self.damaged += 1
            if len(self.first_damaged) < _SHOWN:
                self.first_damaged.append(f"{where}: {error}")
