"""Reads and writes traces: one JSON object a line, plain (.jsonl) or gzip (.jsonl.gz).

A null stays None here; `complete.py` fills gaps. Unknown keys are ignored. `problems.py` describes
faults of a file.
"""

import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BufferedReader
from pathlib import Path

from heddle_core.json_faults import NO_JSON
from heddle_trace.errors import TraceError
from heddle_trace.limits import MAX_FILE_BYTES
from heddle_trace.problems import EMPTY, RECORD_DECODER, Problem, problems_in
from heddle_trace.schema import Trace, TrajectoryRecord
from heddle_trace.table import Records, TableBuilder
from heddle_trace.writing import TraceWriter

_PIECE = 1024**2
_GZIP_MAGIC = b"\x1f\x8b"


def read_trace(path: str | Path) -> Trace:
    """Read and check a whole trace. Named after the file, without .jsonl or .jsonl.gz.

    Its records go into columns line by line. Raises TraceError at the first fault, naming the file,
    the line and the field.
    """
    path = Path(path)
    digest, found = hashlib.sha256(), TableBuilder(Records)
    decode = RECORD_DECODER.decode
    try:
        for line in _lines(path, digest.update):
            if line and not line.isspace():
                if not line.isascii():
                    line.decode()
                found.add(decode(line))
        sound = 0 < len(found.ids) == len(set(found.ids))
    except NO_JSON:
        sound = False
    if not sound:
        changed = Problem(0, "", "changed while it was read; read it again")
        raise TraceError(f"{path}: {next(iter(problems(path, 1)), changed)}")
    return Trace(_name(path), found.build(), digest.hexdigest())


def problems(path: str | Path, limit: int = 100) -> list[Problem]:
    """The first `limit` faults of a trace file; an empty list when `read_trace` would accept it."""
    try:
        return problems_in(partial(_lines, Path(path)), limit)
    except TraceError as error:
        return [Problem(0, "", str(error).removeprefix(f"{path}: "))]


def write_trace(path: str | Path, records: Sequence[TrajectoryRecord]) -> Trace:
    """Write records, plain or gzip by suffix, and return what was written.

    Equal records give equal bytes. The file appears whole or not at all: it is written beside its
    place and then renamed. Raises TraceError for records that could not be read back as they are,
    OSError when the disk refuses.
    """
    with TraceWriter(path) as writer:
        for number, record in enumerate(records, start=1):
            try:
                writer.write(record)
            except TraceError as error:
                raise TraceError(f"{path} (not written): line {number}: {error}") from None
        if not writer.trajectories:
            raise TraceError(f"{path} (not written): {EMPTY}")
    return Trace(_name(writer.path), records, writer.sha256)


def _lines(path: Path, digest: Callable[[bytes], object] = lambda piece: None) -> Iterator[bytes]:
    """The lines of a trace file, unpacked and without their end; `digest` gets the bytes.

    Raises TraceError.
    """
    try:
        if path.is_dir():
            raise TraceError(f"{path}: is a folder; name the .jsonl or .jsonl.gz file in it")
        if path.exists() and not path.is_file():
            message = "is a pipe or a device; save it to a file, since it is read more than once"
            raise TraceError(f"{path}: {message}")
        with path.open("rb") as stream:
            begun: list[bytes] = []  # of a line that ends in a later piece
            for piece in _pieces(path, stream):
                digest(piece)
                first, *rest = piece.split(b"\n")
                begun.append(first)
                if rest:
                    yield b"".join(begun)
                    begun = [rest.pop()]
                    yield from rest
            yield b"".join(begun)
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file; check the path") from None
    except EOFError:
        message = "the gzip data ends too early; the file was cut off: copy or write it again"
        raise TraceError(f"{path}: {message}") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        message = f"the gzip data is damaged ({error}); copy or write it again"
        raise TraceError(f"{path}: {message}") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from None


def _pieces(path: Path, stream: BufferedReader) -> Iterator[bytes]:
    """The uncompressed bytes of a trace file, piece by piece."""
    start = stream.peek(2)[:2]
    if not start:
        raise TraceError(f"{path}: {EMPTY}")
    is_gzip = start == _GZIP_MAGIC
    if is_gzip != path.name.endswith(".gz"):
        content, remedy = (
            ("gzip", "rename it to *.jsonl.gz")
            if is_gzip
            else ("not gzip", "rename it to *.jsonl, or compress it")
        )
        raise TraceError(f"{path}: its content is {content}, unlike its name; {remedy}")
    source = gzip.GzipFile(fileobj=stream) if is_gzip else stream
    size = 0
    while piece := source.read(_PIECE):
        size += len(piece)
        if size > MAX_FILE_BYTES:
            message = f"unpacks to more than {MAX_FILE_BYTES // 1024**3} GiB; split it by groups"
            raise TraceError(f"{path}: {message}")
        yield piece


def _name(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")
