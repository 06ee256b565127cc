"""Writes a file, or a trace record by record: whole or not at all."""

import atexit
import gzip
import hashlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

import msgspec

from heddle_trace.errors import TraceError
from heddle_trace.limits import MAX_FILE_BYTES
from heddle_trace.problems import RECORD_DECODER, line_problems
from heddle_trace.schema import TrajectoryRecord

_PIECE_BYTES = 1024**2
"""Of a trace, written at once."""
_unfinished: set[Path] = set()


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside the path; it is renamed when the block ends without an error.

    Raises OSError, with the path of the argument, when the disk refuses.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _unfinished.add(beside)
    try:
        with beside.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(path)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # the user's path
            error.add_note(f"{path.name} was not written.")
        raise
    finally:
        _unfinished.discard(beside)


@atexit.register
def remove_unfinished() -> None:
    """Remove temporary files of this process that a signal on the way out of `whole` has left."""
    for path in _unfinished:
        if path.name.endswith(
            f".{os.getpid()}.tmp"
        ):  # not of the process that this was forked from
            with suppress(OSError):
                path.unlink()


def packed(stream: BinaryIO) -> BinaryIO:
    """Gzip without the time and the file name, which would make equal traces differ."""
    gz = gzip.GzipFile(filename="", mode="wb", fileobj=stream, compresslevel=9, mtime=0)
    return cast(BinaryIO, gz)


class TraceWriter:
    """Writes a trace one record at a time, in memory that does not grow with it.

    A context manager: the file appears when the block ends without an error. Equal records give
    equal bytes.
    """

    def __init__(self, path: str | Path) -> None:
        """Raise TraceError for a name that is not a trace's."""
        self.path = Path(path)
        if not self.path.name.endswith((".jsonl", ".jsonl.gz")):
            raise TraceError(f"{path}: a trace must be named *.jsonl or *.jsonl.gz")
        self.trajectories = 0
        self._bytes = 0
        self._piece = bytearray()
        self._hash = hashlib.sha256()
        self._stack = ExitStack()

    @property
    def sha256(self) -> str:
        """Hash of the uncompressed bytes, once they are written."""
        return self._hash.hexdigest()

    def __enter__(self) -> "TraceWriter":
        with ExitStack() as stack:
            self._stream = stack.enter_context(whole(self.path))
            if self.path.name.endswith(".gz"):
                self._stream = stack.enter_context(packed(self._stream))
            # A database without a name is private, and on disk only when it outgrows its cache.
            self._ids = sqlite3.connect("", isolation_level=None)
            stack.callback(self._ids.close)
            self._ids.execute("PRAGMA journal_mode=OFF")
            self._ids.execute("CREATE TABLE ids (id TEXT PRIMARY KEY) WITHOUT ROWID")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Rename the file to its path, or remove it."""
        if error is not None:
            self._stack.__exit__(kind, error, trace)
        else:
            with self._stack:
                self._flush()

    def write(self, record: TrajectoryRecord) -> None:
        """Add a record.

        Raises TraceError, naming the field, for one that could not be read back as it is, or whose
        id is taken. The record is then left out, and the writer may go on.
        """
        try:
            line = msgspec.json.encode(record) + b"\n"
        except UnicodeEncodeError:
            raise TraceError("it holds half of a character, which no file can hold") from None
        try:
            back = RECORD_DECODER.decode(line)
        except msgspec.MsgspecError:
            problem = next(line_problems(1, line, {}))
            raise TraceError(str(problem).removeprefix("line 1: ")) from None
        if back != record:  # NaN is encoded as null: a number would silently become a gap.
            raise TraceError("it holds a number that JSON does not have, NaN or Infinity")
        if self._bytes + len(line) > MAX_FILE_BYTES:
            raise TraceError(f"the trace outgrows {MAX_FILE_BYTES // 1024**3} GiB; import less")
        try:
            self._ids.execute("INSERT INTO ids VALUES (?)", (record.trajectory_id,))
        except sqlite3.IntegrityError:
            message = f"trajectory_id {record.trajectory_id!r} is taken by an earlier record"
            raise TraceError(message) from None
        self._piece += line
        self._bytes += len(line)
        self.trajectories += 1
        if len(self._piece) >= _PIECE_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._hash.update(self._piece)
        self._stream.write(self._piece)
        self._piece.clear()
