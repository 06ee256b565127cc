"""One import: files in, a trace and a report out."""

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os.path import realpath
from pathlib import Path

from heddle_trace.errors import TraceError
from heddle_trace.importers.folders import chosen_files
from heddle_trace.importers.formats import AUTO, FORMATS, suspicion
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.protocol import ImportContext
from heddle_trace.importers.tokens import CHARS_PER_TOKEN, counter
from heddle_trace.writing import TraceWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """Counts of an import: read, written, left out, assumed.

    `read` counts lines, items of documents, or members of archives. `damaged` of them were left
    out under `skip_bad`; `first_damaged` has the place and fault of the first ones. `foreign` are
    files of a folder that are of another format, and were left out.
    """

    format: str
    files: tuple[str, ...]
    foreign: tuple[str, ...]
    read: int
    trajectories: int
    steps: int
    output_tokens: int
    damaged: int
    first_damaged: tuple[str, ...]
    dropped: Mapping[str, int]
    assumed: Mapping[str, int]
    assumptions: tuple[str, ...]
    sha256: str


def import_trace(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    format: str = AUTO,
    skip_bad: bool = False,
    tokenizer: str | None = None,
    chars_per_token: float = CHARS_PER_TOKEN,
    workload: str | None = None,
    on_progress: Callable[[int, int], None] = lambda read, written: None,
) -> ImportReport:
    """Read logs of one format and write them as a trace: counts and times only.

    A folder stands for its files of one format (`folders.chosen_files`). Memory does not grow with
    the files, beyond the largest record. `tokenizer` and
    `chars_per_token` control the token counts that the log lacks (`tokens.counter`).
    `workload` replaces the format's own name of the task. `on_progress` gets the numbers of records
    read and trajectories written, after each trajectory.

    Raises TraceError, naming file and line, for files that violate their format; with
    `skip_bad` damaged records are left out and counted instead. The trace is then not written.
    """
    if not paths:
        raise TraceError("no file to import; name one or more")
    found = chosen_files(paths, format)
    files, name = found.sources, found.format
    if any(realpath(out) == realpath(source.path) for source in files):
        raise TraceError(f"{out}: is one of the files to import; write to another")
    tokens = counter(tokenizer, chars_per_token)
    notes = Notes(skip_bad=skip_bad, suspect=lambda line: suspicion(line, name))
    steps = output_tokens = 0
    try:
        with TraceWriter(out) as writer:
            for parsed in FORMATS[name].records(files, ImportContext(notes, tokens, workload)):
                with notes.guard(parsed.where):
                    try:
                        writer.write(parsed.record)
                    except TraceError as error:
                        raise DamagedError(str(error)) from None
                    steps += len(parsed.record.steps)
                    output_tokens += sum(step.output_tokens or 0 for step in parsed.record.steps)
                on_progress(notes.read, writer.trajectories)
            if not writer.trajectories:
                raise TraceError(f"{files[0].path}: {_empty(notes)}; nothing was written")
    except sqlite3.OperationalError as error:
        raise TraceError(
            f"no space for temporary files ({error}); set TMPDIR to another disk"
        ) from None
    if tokens.texts:
        notes.assume(f"texts counted {tokens.name}, for counts not recorded", tokens.texts)
    return ImportReport(
        format=name,
        files=tuple(str(source.path) for source in files),
        foreign=found.foreign,
        read=notes.read,
        trajectories=writer.trajectories,
        steps=steps,
        output_tokens=output_tokens,
        damaged=notes.damaged,
        first_damaged=tuple(notes.first_damaged),
        dropped=dict(notes.dropped),
        assumed=dict(notes.assumed),
        assumptions=FORMATS[name].assumes,
        sha256=writer.sha256,
    )


def _empty(notes: Notes) -> str:
    left_out = [*(f"{count:,} {what}" for what, count in notes.dropped.items())]
    if notes.damaged:
        left_out.append(f"{notes.damaged:,} damaged records, the first at {notes.first_damaged[0]}")
    why = f" (left out: {'; '.join(left_out)})" if left_out else ""
    return f"holds no trajectory of this format{why}"
