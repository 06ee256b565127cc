"""The file of a journal: written batch by batch, and read as far as it goes.

It is an Arrow IPC file with dictionaries that grow. Without its footer, it is a stream after its
first bytes: that of an unfinished run, and of one without an end of its own, whose dictionaries are
replaced from time to time.
"""

import os
from collections.abc import Iterator
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

import pyarrow as pa

from heddle.runs import files
from heddle.runs.files import RunError
from heddle.runs.journal_checks import JournalFaults
from heddle.runs.journal_schema import schema

MAGIC = b"ARROW1\0\0"
"""Begins an Arrow IPC file; what follows, up to the footer, is a stream."""
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Ends a stream that was closed."""
_ALONE = pa.ipc.IpcReadOptions(use_threads=False)
"""To begin threads takes longer than to unpack the columns of a batch."""


class JournalFile:
    """A journal that is being written; until it is closed, it has no footer."""

    def __init__(self, path: Path, *, endless: bool = False) -> None:
        """`endless`: it gets no footer, which has a place for each batch, but words may change."""
        self._file = BufferedWriter(FileIO(path, "wb"), 1 << 20)
        options = pa.ipc.IpcWriteOptions(
            compression="lz4", emit_dictionary_deltas=True, use_threads=False
        )
        if endless:
            self._file.write(MAGIC)
        new = pa.ipc.new_stream if endless else pa.ipc.new_file
        self._writer = new(self._file, schema(), options=options)
        self._file.flush()
        self._whole = True
        self._error: OSError | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a batch, so that it survives this process."""
        if not self._whole:
            return
        self._whole = False
        try:
            self._writer.write_batch(batch)
            self._file.flush()
        except OSError as error:
            self._error = error
            raise
        self._whole = True

    def close(self) -> None:
        """Add the end, unless a write broke off: the batches before it can be read.

        Raises:
            OSError: a batch could not be written, or the end cannot.
        """
        if self._file.closed:
            return
        try:
            if self._error is not None:
                raise self._error
            if self._whole:
                self._writer.close()
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def journal_batches(folder: Path, *, whole: bool) -> Iterator[pa.RecordBatch]:
    """Yield the batches of the journal of a run directory, with the same words in all of them.

    Unless it must be `whole`, as far as it goes. A journal may be larger than memory.

    Raises:
        RunError: it is missing or damaged.
    """
    path = folder / files.JOURNAL
    faults = JournalFaults()
    with files.readable(path):
        for batch in _batches(path, whole=whole):
            if (wrong := faults.of(files.checked(path, batch, schema().names))) is not None:
                break
            yield batch
        else:
            wrong = faults.at_end()
    if wrong is not None:
        raise RunError(f"{path}: damaged: {wrong}; copy it again, or run it again")


def _batches(path: Path, *, whole: bool) -> Iterator[pa.RecordBatch]:
    with files.opened(path) as file:
        try:
            reader = pa.ipc.open_file(file, options=_ALONE)
        except pa.ArrowInvalid:
            with path.open("rb") as found:
                ours = MAGIC.startswith(found.read(len(MAGIC)))
                found.seek(max(0, path.stat().st_size - len(_END)))
                ended = found.read() == _END
            if not ours or (whole and not ended):
                raise
        else:
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)
            return
    # In a stream, dictionaries grow from each batch on, or are replaced.
    parts = list(stream_of(path, whole=whole))
    table = pa.Table.from_batches(parts, parts[0].schema if parts else schema())
    table.validate(full=True)  # to unify reads words wherever they are said to be
    yield from table.unify_dictionaries().to_batches()


def stream_of(path: Path, *, whole: bool) -> Iterator[pa.RecordBatch]:
    """Yield the batches after the first bytes; unless it must be `whole`, as far as they go.

    Raises:
        pa.ArrowInvalid, OSError, EOFError: it is not whole, but must be.
    """
    try:
        name: Any = os.fsencode(path)
        with pa.OSFile(name, "rb") as file:  # not mapped: pages read count as memory in use
            file.seek(len(MAGIC))
            with pa.ipc.open_stream(file, options=_ALONE) as stream:
                yield from stream
    except (pa.ArrowInvalid, OSError, EOFError):
        if whole:
            raise
        return  # cut off in the middle of a batch: what came before it is whole
