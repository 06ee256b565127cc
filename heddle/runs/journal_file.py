"""The file of a journal: written batch by batch, and read as far as it goes.

It is an Arrow IPC file with dictionaries that grow. Without its footer, it is a stream after its
first bytes.
"""

import os
from collections.abc import Iterator
from io import BufferedWriter, FileIO
from pathlib import Path

import pyarrow as pa

from heddle.runs import files
from heddle.runs.files import RunError
from heddle.runs.journal_checks import fault
from heddle.runs.journal_schema import schema

MAGIC = b"ARROW1\0\0"
"""Begins an Arrow IPC file; what follows, up to the footer, is a stream."""


class JournalFile:
    """A journal that is being written; until it is closed, it has no footer."""

    def __init__(self, path: Path) -> None:
        self._file = BufferedWriter(FileIO(path, "wb"), 1 << 20)
        options = pa.ipc.IpcWriteOptions(
            compression="lz4", emit_dictionary_deltas=True, use_threads=False
        )
        self._writer = pa.ipc.new_file(self._file, schema(), options=options)
        self._file.flush()
        self._whole = True

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a batch, so that it survives this process."""
        if not self._whole:
            return
        self._whole = False
        self._writer.write_batch(batch)
        self._file.flush()
        self._whole = True

    def close(self) -> None:
        """Add the footer, unless a write broke off: the batches before it can be read."""
        if self._file.closed:
            return
        try:
            if self._whole:
                self._writer.close()
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def read_journal(folder: Path, *, whole: bool) -> pa.Table:
    """Read the journal of a run directory; unless it must be `whole`, as far as it goes.

    Raises:
        RunError: it is missing or damaged.
    """
    path = folder / files.JOURNAL
    with files.readable(path):
        try:
            with files.opened(path) as file:
                table = pa.ipc.open_file(file).read_all()
        except pa.ArrowInvalid:
            with path.open("rb") as begin:
                ours = MAGIC.startswith(begin.read(len(MAGIC)))
            if whole or not ours:
                raise
            table = _without_footer(path)
        found = fault(files.checked(path, table, schema().names))
    if found is not None:
        raise RunError(f"{path}: damaged: {found}; copy it again, or run it again")
    return table


def _without_footer(path: Path) -> pa.Table:
    """Read the whole batches of an Arrow file that was cut off; dictionaries grow from each on."""
    batches = list(_stream(path))
    found = batches[0].schema if batches else schema()
    return pa.Table.from_batches(batches, found).unify_dictionaries()


def _stream(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the whole batches of the stream after the first bytes."""
    try:
        with files.opened(path) as file:
            file.seek(len(MAGIC))
            with pa.ipc.open_stream(file) as stream:
                yield from stream
    except (pa.ArrowInvalid, OSError, EOFError):
        return  # cut off in the middle of a batch: what came before it is whole
