"""Run directories: opened, appended to, closed; and loaded again; see docs/run-directory.md.

A run is a result only when its manifest says "finished", which is written last. Until then its
journal can be read up to its last whole batch.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from heddle.config import RunConfig
from heddle.config_files import from_builtins, to_builtins
from heddle.cost.prices import RunCost
from heddle.runs import files
from heddle.runs.conditions import lateness_figures
from heddle.runs.files import RunError
from heddle.runs.journal_buffer import CHUNK_ENTRIES, JournalBuffer, of_growing_words
from heddle.runs.journal_columns import Journal, JournalReader, all_columns
from heddle.runs.journal_entries import decode, from_text
from heddle.runs.journal_file import JournalFile, journal_batches, stream_of
from heddle.runs.manifest import (
    SCHEMA,
    ManifestFields,
    RunFacts,
    Status,
    new_manifest,
    stamp,
    why_unfinished,
)
from heddle.runs.metrics import Measured, SoloTpot, measure
from heddle.runs.shape_keys import from_plain, to_plain
from heddle.runs.tables import MEASURED
from heddle.runs.written_files import check_hashes, check_sizes, list_files
from heddle_core.journal import Entry, Sink
from heddle_core.policy import PolicyContext

if TYPE_CHECKING:
    from heddle_runtime.clock import Lateness

__all__ = ["Run", "RunDirectory", "RunError", "RunFacts", "load_run", "open_run"]

_OF_OLDER_RUNS = "heddle.run/1"
_ENDLESS = ("heddle_gateway", "heddle_verl")
"""Drivers of runs without an end of their own: what such a run keeps in memory does not grow."""
MOST_ROWS_KEPT = 4_000_000
"""Rows of a journal whose columns stay in memory, 100 MB; those of more rows are read back."""


def open_run(
    out: Path, config: RunConfig, facts: RunFacts, *, config_text: str | None = None
) -> "RunDirectory":
    """Make a new run directory in `out` and return it open, to be used as a context manager.

    Nothing is ever overwritten: a name that is taken gets a suffix.

    Raises:
        RunError: `out` has no parent directory, or is a file.
        OSError: the directory cannot be made or written.
    """
    files.check_out(out)
    out.mkdir(exist_ok=True)
    now = datetime.now(UTC)
    path = files.new_folder(out, _name(now, config, facts))
    try:
        return RunDirectory(path, config, facts, started=now, config_text=config_text)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)  # nothing has happened in it yet
        raise


def _name(now: datetime, config: RunConfig, facts: RunFacts) -> str:
    regime = f"{facts.loop['regime']}-" if facts.loop is not None else ""
    parts = f"{facts.trace_name}-{regime}{config.policy.preset}"
    plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in parts)[:120]
    return f"{now:%Y-%m-%dT%H-%M-%S}-{plain}-s{config.seed}"


class RunDirectory:
    """An open run. `record` is the sink of `heddle_core.journal.recorded`.

    Leaving the `with` block without `finish` closes the run as failed; an exception closes it as
    interrupted or failed, with the journal up to there.
    """

    def __init__(
        self,
        path: Path,
        config: RunConfig,
        facts: RunFacts,
        *,
        started: datetime,
        config_text: str | None,
    ) -> None:
        self.path = path
        self.status: Status = "running"
        self._manifest = new_manifest(path.name, config, facts, started)
        self._write_manifest()
        if config_text is not None:
            files.write_whole(path / files.CONFIG_GIVEN, lambda f: f.write(config_text.encode()))
        files.write_json(path / files.CONFIG_RESOLVED, to_builtins(config))
        if facts.context is not None:
            context = replace(facts.context, learned=None)
            files.write_json(path / files.CONTEXT, to_plain(context))
        self._endless = facts.driver in _ENDLESS
        self._file = JournalFile(path / files.JOURNAL, endless=self._endless)
        self._columns = None if self._endless else JournalReader(MEASURED)
        self._rows = JournalBuffer(
            entries=CHUNK_ENTRIES, on_full=lambda: self.flush(), forgets=self._endless
        )
        self.record: Sink = self._rows.record
        """Record one event with its commands."""

    def learn(self, **facts: Any) -> None:
        """Add to the manifest's section `world`."""
        self._manifest["world"] = {**self._manifest["world"], **facts}
        self._write_manifest()

    def flush(self) -> None:
        """Write entries held in memory, so that they survive this process."""
        # Taken out first: an interrupt from here on may lose these entries, never write them twice.
        batch = self._rows.take()
        if batch.num_rows:
            self._file.write(batch)
            if self._columns is not None:
                self._columns.add(batch)
                if self._rows.rows > MOST_ROWS_KEPT:
                    self._columns = None

    def columns(self, *, whole: bool = False) -> Journal:
        """Return what is recorded so far, the columns that figures are made from."""
        self.flush()
        reader, self._columns = self._columns, None if whole else self._columns
        if reader is None:
            reader = JournalReader(MEASURED)
            batches = stream_of(self.path / files.JOURNAL, whole=whole)
            for batch in of_growing_words(batches) if self._endless else batches:
                reader.add(batch)
        return reader.journal()

    def finish(
        self,
        *,
        solo_tpot: SoloTpot | None = None,
        notes: Mapping[str, Any] | None = None,
        cost: Callable[[float], RunCost] | None = None,
        lateness: "Lateness | None" = None,
    ) -> Measured:
        """Close the run as finished: the journal's footer, tables and summary.

        `cost` is of a makespan in seconds. `notes` go into the summary as they are. `lateness` is
        that of a clock in real time.

        Raises:
            MetricsError: the journal does not add up; the run is then closed as failed.
        """
        assert self.status == "running", "a closed run never changes"
        self._close_journal()
        with files.written_table(self.path / files.STEPS) as write:
            measured = measure(self.columns(whole=True), solo_tpot, on_steps=write)
        with files.written_table(self.path / files.TRAJECTORIES) as write:
            write(measured.trajectories)
        summary = dict(measured.summary)
        makespan_s, trajectories = summary["makespan_s"], summary["arrived"]
        if cost is not None:
            summary |= cost(makespan_s).plain()
        if lateness is not None:
            summary |= lateness_figures(lateness, makespan_s, trajectories)
        summary |= notes or {}
        files.write_json(self.path / files.SUMMARY, summary)
        self._manifest["files"] = list_files(self.path)
        self._close("finished")
        for file in filter(Path.is_file, self.path.rglob("*")):
            file.chmod(0o444)
        return replace(measured, summary=summary)

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Close the run, whatever happened; never hides the exception that ended it."""
        if self.status != "running":
            return
        if error is not None:
            error.add_note(f"{self.path} keeps the journal up to there; it is no result.")
        # A disk without space for the rest of the journal may have space for the status.
        with suppress(OSError):
            self._close_journal()
        try:
            if isinstance(error, KeyboardInterrupt):
                self._close("interrupted", str(error) or "interrupted from the keyboard")
            else:
                said = f"{type(error).__name__}: {error}" if error else "closed before its end"
                self._close("failed", said)
        except OSError:
            # No space even for the status: it stays "running", which no reader takes for a result.
            if error is None:
                raise

    def _close_journal(self) -> None:
        try:
            self.flush()
        finally:
            self._file.close()
            self._rows = JournalBuffer()  # the words of the old one take memory
            self.record = self._rows.record

    def _close(self, status: Status, error: str | None = None) -> None:
        self._manifest["closed"] = stamp(datetime.now(UTC))
        self._manifest["error"] = error
        self._manifest["status"] = status
        self._write_manifest()
        self.status = status

    def _write_manifest(self) -> None:
        files.write_json(self.path / files.MANIFEST, self._manifest)


@dataclass(frozen=True, slots=True)
class Run:
    """A closed run directory, or an unfinished one on request."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def status(self) -> Status:
        """Whether it finished, and if not, why."""
        status: Status = self.manifest["status"]
        return status

    def verify(self) -> None:
        """Compare the content of its files with the hashes in its manifest, if it has any.

        Raises:
            RunError: a file is not what the run wrote.
        """
        check_hashes(self.path, self.manifest.get("files", {}))

    @property
    def label(self) -> str:
        """Its label in tables and figures: policy and seed, and the regime of a loop."""
        loop = self.manifest.get("loop")
        plan = loop["config"].get("epoch_plan") if loop else None
        regime = f"{loop['regime']} {f'({plan}) ' if plan else ''}" if loop else ""
        return f"{regime}{self.manifest['policy']} s{self.manifest['seed']}"

    @property
    def config(self) -> RunConfig:
        path = self.path / files.CONFIG_RESOLVED
        return from_builtins(files.read_json(path), str(path))

    @property
    def unfinished(self) -> str | None:
        """Why it has no results; None for a finished run."""
        return None if self.status == "finished" else why_unfinished(self.manifest)

    @property
    def context(self) -> PolicyContext | None:
        """The policy's context without its model; None if the driver kept none."""
        path = self.path / files.CONTEXT
        if not path.exists():
            return None
        try:
            plain = from_plain(files.read_json(path) | {"learned": None})
            return msgspec.convert(plain, PolicyContext, str_keys=True, dec_hook=from_text)
        except msgspec.ValidationError as e:
            raise RunError(f"{path}: damaged: {e}") from None

    @property
    def summary(self) -> Mapping[str, Any]:
        path = self.path / files.SUMMARY
        figures = files.read_json(path)
        if not isinstance(figures.get("dispatches"), int):
            raise RunError(f"{path}: damaged: it has no number of dispatches")
        return figures

    @property
    def steps(self) -> pa.Table:
        """One row per step."""
        return files.read_table(self.path / files.STEPS, numbers=("queueing_s", "engine_queued_s"))

    @property
    def trajectories(self) -> pa.Table:
        """One row per trajectory."""
        numbers = ("arrived_s", "finished_s", "steps")
        return files.read_table(self.path / files.TRAJECTORIES, ("trajectory",), numbers=numbers)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The journal in parts, one row per event or command; up to where it broke off, when the
        run did not finish. That of a large run takes ten times its columns in memory."""
        return journal_batches(self.path, whole=self.status == "finished")

    def columns(self) -> Journal:
        """The columns of each event and command in the journal that figures are made from."""
        return all_columns(self.batches())

    def entries(self) -> Iterator[Entry]:
        """The journal as it was recorded: each event with its commands."""
        return decode(self.batches())


def load_run(path: str | Path, *, unfinished: bool = False) -> Run:
    """Load a run directory.

    With `unfinished`, one that was interrupted, failed or still runs is loaded too: it has a
    journal as far as it got, and neither tables nor a summary. The sizes of a finished run's files
    are compared with its manifest; `Run.verify` compares their content.

    Raises:
        RunError: it is no run directory, is damaged, or did not finish.
    """
    path = Path(path)
    if not (path / files.MANIFEST).is_file():
        why = f"it has no {files.MANIFEST}" if path.exists() else "it does not exist"
        raise RunError(
            f"{path}: not a run directory ({why}); `heddle runs` lists those of a folder"
        )
    manifest = files.read_json(path / files.MANIFEST)
    if manifest.get("schema") == _OF_OLDER_RUNS:
        raise RunError(
            f"{path}: its schema is {_OF_OLDER_RUNS!r}, made by heddle 0.1.x; heddle 0.1 reads it"
        )
    if manifest.get("schema") != SCHEMA:
        raise RunError(
            f"{path}: its schema is {manifest.get('schema')!r}; this version reads {SCHEMA!r}"
        )
    try:
        msgspec.convert(manifest, ManifestFields)
    except (msgspec.ValidationError, UnicodeEncodeError) as e:
        raise RunError(f"{path / files.MANIFEST}: damaged: {e}") from None
    run = Run(path, manifest)
    if run.unfinished is not None and not unfinished:
        raise RunError(f"{path}: {run.unfinished}, so it has no results; {_then(manifest)}")
    check_sizes(path, manifest.get("files", {}))
    return run


def _then(manifest: Mapping[str, Any]) -> str:
    """What to do about an unfinished run. Clients of a gateway cannot be run again."""
    if manifest.get("driver") == "heddle_gateway":
        return (
            "a gateway has them after one Ctrl-C or SIGTERM; heddle replay reads its journal, and "
            "heddle trace extract makes a trace of what has ended"
        )
    return "run it again"
