"""Progress of long work on standard error: current work, count, time left.

Only on a terminal: nothing is written if standard error is a file or a pipe.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class _Left(TimeRemainingColumn):
    """Time left, with a label."""

    def render(self, task: Task) -> Text:
        """Empty while it is unknown."""
        if task.total is None or task.time_remaining is None:
            return Text("")
        return Text.assemble(super().render(task), " left")


class _Count(ProgressColumn):
    """Count and total, if the total is known."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._plain = MofNCompleteColumn()
        self._unit = unit

    def render(self, task: Task) -> Text:
        """Empty for work without a count."""
        if task.total is None:
            return Text("")
        return Text.assemble(self._plain.render(task), f" {self._unit}" if self._unit else "")


@dataclass(frozen=True, slots=True)
class ProgressBar:
    """A progress bar on the terminal."""

    _bar: Progress
    _task: TaskID

    def now(self, what: str) -> None:
        self._bar.update(self._task, description=what)

    def at(self, done: int, total: int) -> None:
        """Show the count and the total."""
        self._bar.update(self._task, completed=done, total=total)

    @property
    def seen(self) -> bool:
        """Whether it is shown; if not, work need not be counted."""
        return not self._bar.disable

    @property
    def count(self) -> Callable[[int, int], None] | None:
        """`at`; None if the bar is not shown."""
        return self.at if self.seen else None


@contextmanager
def progress(what: str, unit: str = "") -> Iterator[ProgressBar]:
    """Show `what` is running until the block is left; a total comes with `ProgressBar.at`."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        _Count(unit),
        TimeElapsedColumn(),
        _Left(),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar:
        yield ProgressBar(bar, bar.add_task(what, total=None))


def running(names: Sequence[str], done: Sequence[int], each: int) -> str:
    """Name the runs under way, or the first waiting run if there is none."""
    under_way = [name for name, n in zip(names, done, strict=True) if 0 < n < each]
    waiting = [name for name, n in zip(names, done, strict=True) if n == 0]
    return ", ".join(under_way or waiting[:1]) or "closing"
