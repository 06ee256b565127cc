"""Reads and writes traces: one JSON object a line, plain (.jsonl) or gzip (.jsonl.gz).

A null stays None here; `complete.py` fills gaps. Unknown keys are ignored. `problems.py` describes
faults of a file.
"""

import gzip
import hashlib
import io
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from heddle_trace.errors import TraceError
from heddle_trace.limits import MAX_FILE_BYTES
from heddle_trace.problems import RECORD_DECODER, Problem, problems_in
from heddle_trace.schema import Trace, TrajectoryRecord
from heddle_trace.writing import packed, trace_path, whole

_PIECE = 1024**2
_GZIP_MAGIC = b"\x1f\x8b"


def read_trace(path: str | Path) -> Trace:
    """Read and check a whole trace. Named after the file, without .jsonl or .jsonl.gz.

    Raises TraceError at the first fault, naming the file, the line and the field.
    """
    path = Path(path)
    data = _load(path)
    return Trace(_name(path), _parse(data, str(path)), hashlib.sha256(data).hexdigest())


def problems(path: str | Path, limit: int = 100) -> list[Problem]:
    """The first `limit` faults of a trace file; an empty list when `read_trace` would accept it."""
    try:
        data = _load(Path(path))
    except TraceError as error:
        return [Problem(0, "", str(error).removeprefix(f"{path}: "))]
    return problems_in(data, limit)


def write_trace(path: str | Path, records: Sequence[TrajectoryRecord]) -> Trace:
    """Write records, plain or gzip by suffix, and return what was written.

    Equal records give equal bytes. The file appears whole or not at all: it is written beside its
    place and then renamed. Raises TraceError for records that could not be read back as they are,
    OSError when the disk refuses.
    """
    path = trace_path(path)
    data = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    records = tuple(records)
    for number, (back, record) in enumerate(
        zip(_parse(data, f"{path} (not written)"), records, strict=True), start=1
    ):
        if back != record:  # NaN is encoded as null: a number would silently become a gap.
            raise TraceError(
                f"{path} (not written): line {number}: {record.trajectory_id!r} holds a value that "
                "does not survive JSON; replace NaN and Infinity by None or a number"
            )
    with whole(path) as stream:
        if path.name.endswith(".gz"):
            with packed(stream) as gz:
                gz.write(data)
        else:
            stream.write(data)
    return Trace(_name(path), records, hashlib.sha256(data).hexdigest())


def _parse(data: bytes, label: str) -> tuple[TrajectoryRecord, ...]:
    decode = RECORD_DECODER.decode
    with suppress(msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        if not data.isascii():
            data.decode()
        records = tuple(decode(ln) for ln in data.split(b"\n") if ln and not ln.isspace())
        if records and len({record.trajectory_id for record in records}) == len(records):
            return records
    raise TraceError(f"{label}: {problems_in(data, 1)[0]}")


def _load(path: Path) -> bytes:
    """The uncompressed bytes of a trace file."""
    try:
        if path.is_dir():
            raise TraceError(f"{path}: is a folder; name the .jsonl or .jsonl.gz file in it")
        if path.exists() and not path.is_file():
            message = "is a pipe or a device; save it to a file, since it is read more than once"
            raise TraceError(f"{path}: {message}")
        with path.open("rb") as stream:
            start = stream.peek(2)[:2]
            if not start:
                raise TraceError(f"{path}: holds no trajectories; write one JSON object a line")
            packed = start == _GZIP_MAGIC
            if packed != path.name.endswith(".gz"):
                content, remedy = (
                    ("gzip", "rename it to *.jsonl.gz")
                    if packed
                    else ("not gzip", "rename it to *.jsonl, or compress it")
                )
                raise TraceError(f"{path}: its content is {content}, unlike its name; {remedy}")
            source = gzip.GzipFile(fileobj=stream) if packed else stream
            held = io.BytesIO()
            # Piece by piece: a read of the largest size would claim that much memory at once.
            while held.tell() <= MAX_FILE_BYTES and (piece := source.read(_PIECE)):
                held.write(piece)
            data = held.getvalue()
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
    if len(data) > MAX_FILE_BYTES:
        message = f"unpacks to more than {MAX_FILE_BYTES // 1024**3} GiB; split it by groups"
        raise TraceError(f"{path}: {message}")
    return data


def _name(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")
