"""Output files of verbs: checked before the work, written whole."""

from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from heddle.runs.files import write_whole

if TYPE_CHECKING:
    from heddle.runs import Run


class OutputError(ValueError):
    """A file that cannot be written; the message says why and what to do."""


def new_file(path: Path, force: bool | None = None) -> None:
    """Check that a file can be written, before the work begins. `force` None: there is no --force.

    Raises:
        OutputError: its folder is missing, it is a folder, or it exists and may not be replaced.
    """
    if path.is_dir():
        raise OutputError(f"{path}: is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise OutputError(f"{path.parent}: no such folder; make it first")
    if path.exists() and not force:
        remedy = "remove it" if force is None else "replace it with --force"
        raise OutputError(f"{path}: exists; name another file, or {remedy}")


def checked_figure(name: str) -> Path | None:
    """Check the file to draw, report.figure, before the work begins; None if nothing is drawn.

    Raises:
        TraceError: the suffix names no kind of figure.
        OutputError: it cannot be written.
    """
    if not name:
        return None
    from heddle.reports.trace_figures import figure_path

    path = figure_path(Path(name))
    new_file(path, force=True)
    return path


def write(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all.

    Raises:
        OutputError: the file may not be written there.
        OSError: the disk is full or broken.
    """
    try:
        write_whole(path, lambda file: file.write(content))
    except PermissionError:
        raise OutputError(f"{path}: permission denied; name a file in another folder") from None


def any_run(path: Path, what: str) -> "Run":
    """Load a run; of one that did not finish, say `what` is done with its journal."""
    from heddle.runs import load_run

    run = load_run(path, unfinished=True)
    say_unfinished(run, what)
    return run


def say_unfinished(run: "Run", what: str) -> None:
    """Say on standard error that a run has no results, and `what` is done with its journal."""
    if run.unfinished is not None:
        click.echo(f"{run.path}: {run.unfinished}: {what}", err=True)
