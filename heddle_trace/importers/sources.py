"""Files of logs, read as a stream: lines, items of one big JSON document, members of an archive.

Memory holds at most one line or item. A fault of a whole file is a TraceError. A fault of a part
goes to `Notes`, which stops the import or counts it.
"""

import gzip
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path
from typing import BinaryIO, Final, NoReturn, TypeVar, cast

import ijson
import msgspec

from heddle_trace.errors import TraceError
from heddle_trace.importers.checked import PIECE_BYTES, CheckedReader
from heddle_trace.importers.notes import DamagedError, Notes

T = TypeVar("T")

MAX_LINE_BYTES: Final = 64 * 1024**2
"""One line is held in memory; a longer one is a document that is not JSON lines, or rubbish."""

MAX_MEMBER_BYTES: Final = 1024**3
"""One member of an archive is held in memory, unpacked; it can claim to unpack to anything."""

_GZIP, _ZIP, _ZSTD = b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd"
_BOM = b"\xef\xbb\xbf"
_NO_TEXT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # line ends and the like, and stray bytes
BREAKS: Final = (
    EOFError,
    gzip.BadGzipFile,
    zlib.error,
    zipfile.BadZipFile,
    NotImplementedError,
    UnicodeDecodeError,
    ijson.JSONError,
)
"""Errors of a truncated or damaged file; `break_message` explains them to a user."""
_END: Final = object()
_QUOTED = 100  # characters of a library's message; some quote the damage itself


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file. `label` is unique in an import; ids are made of it."""

    path: Path
    label: str
    growing: bool = False
    """It is being written: it may end in the middle of a record, which is left for later."""

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """The uncompressed bytes. Raises TraceError when they cannot be read."""
        with _as_trace_error(self.path), ExitStack() as stack:
            stream: BinaryIO = stack.enter_context(self.path.open("rb"))
            start = stream.read(4)
            stream.seek(0)
            if start.startswith(_ZSTD):
                raise TraceError(f"{self.path}: is compressed with zstd; unpack it first")
            if start.startswith(_GZIP):
                stream = cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=stream)))
            yield stream

    def lines(self, notes: Notes) -> Iterator[tuple[str, bytes]]:
        """Each line that is not blank, with its place for messages."""
        number = 0
        with self.opened() as stream:
            while True:
                where = f"{self.path}: line {number + 1}"
                try:
                    line = stream.readline(MAX_LINE_BYTES + 1)
                    if self.growing and not line.endswith(b"\n"):
                        return
                    too_long = len(line) > MAX_LINE_BYTES and not line.endswith(b"\n")
                    while too_long and not line.endswith(b"\n"):
                        line = stream.readline(MAX_LINE_BYTES) or b"\n"
                except BREAKS as error:
                    notes.line = b""
                    if not self._goes_on(error):
                        notes.damage(where, break_message(error))
                    return
                if not line:
                    notes.line = b""
                    return
                number += 1
                if number == 1:
                    line = line.removeprefix(_BOM)
                if too_long:
                    notes.damage(where, f"is longer than {MAX_LINE_BYTES // 1024**2} MiB")
                elif not line.isspace():
                    notes.line = line
                    yield where, line

    def rows(self, notes: Notes, decoder: "msgspec.json.Decoder[T]") -> Iterator[tuple[str, T]]:
        """Each line as one JSON value; a damaged one stops the import or is left out."""
        for where, line in self.lines(notes):
            notes.read += 1
            with notes.guard(where):
                yield where, decoded(line, decoder)

    def items(self, notes: Notes, prefix: str, kind: type[T]) -> Iterator[tuple[str, T]]:
        """Each value at `prefix` of one JSON document, in ijson's notation, as `kind`."""
        with self.opened() as stream:
            found = ijson.items(CheckedReader(stream), prefix, use_float=True, buf_size=PIECE_BYTES)
            number = 0
            while True:
                try:
                    value = next(found, _END)
                except BREAKS as error:
                    if not self._goes_on(error):
                        notes.damage(f"{self.path}: after record {number}", break_message(error))
                    return
                if value is _END:
                    return
                number += 1
                notes.read += 1
                where = f"{self.path}: record {number}"
                with notes.guard(where):
                    yield where, converted(value, kind)

    def first(self, prefix: str, kind: type[T]) -> T | None:
        """The first value at `prefix`, or None: where the document has none, or is damaged.

        The pass that reads the records reports damage.
        """
        with self.opened() as stream, suppress(DamagedError, *BREAKS):
            for value in ijson.items(
                CheckedReader(stream), prefix, use_float=True, buf_size=PIECE_BYTES
            ):
                return converted(value, kind)
        return None

    def members(self, notes: Notes, pattern: str) -> Iterator[tuple[str, bytes]]:
        """The content of each member of a zip archive whose name matches, in its order."""
        with _as_trace_error(self.path), _archive(self.path) as archive:
            for name in archive.namelist():
                if re.fullmatch(pattern, name):
                    where = f"{self.path}: {name}"
                    with notes.guard(where):
                        yield where, _unpacked(archive, name)

    def _goes_on(self, error: BaseException) -> bool:
        """Whether the file ends too early because it is being written."""
        return self.growing and isinstance(error, EOFError | ijson.IncompleteJSONError)

    @property
    def zipped(self) -> bool:
        with _as_trace_error(self.path), self.path.open("rb") as stream:
            return stream.read(4) == _ZIP


def sources(paths: Sequence[str | Path], *, growing: bool = False) -> list[SourceFile]:
    """Files of an import, each labelled with the shortest unique end of its path.

    Raises TraceError for what is no readable file, and for a file that is named twice.
    """
    named = [Path(path) for path in paths]
    seen: dict[Path, Path] = {}
    for path in named:
        if _NO_TEXT.search(str(path)):
            fault = "the name holds line ends, or bytes that are no text; rename the file"
            raise TraceError(f"{str(path)!a}: {fault}")
        if not path.exists():
            raise TraceError(f"{path}: no such file; check the path")
        if not path.is_file():
            raise TraceError(f"{path}: is a pipe or a device; save it to a file first")
        if seen.setdefault(path.resolve(), path) is not path:
            raise TraceError(f"{path}: is named twice; name each file once")
    labels = _labels(named)
    return [SourceFile(path, label, growing) for path, label in zip(named, labels, strict=True)]


def _labels(paths: Sequence[Path]) -> list[str]:
    """The shortest unique end of each path, without file name endings if possible."""
    plain = [path.absolute() for path in paths]
    for candidates in ([path.with_name(_stem(path.name)) for path in plain], plain):
        for depth in range(1, max((len(path.parts) for path in plain), default=0) + 1):
            labels = ["/".join(path.parts[-depth:]) for path in candidates]
            if len(dict.fromkeys(labels)) == len(labels):
                return labels
    return [str(path) for path in plain]


def decoded(line: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """One JSON value. Raises DamagedError with a message for users."""
    try:
        return decoder.decode(line)
    except msgspec.ValidationError as error:
        raise DamagedError(_field_first(str(error))) from None
    except UnicodeDecodeError:
        raise DamagedError("is not UTF-8; save the file in UTF-8") from None
    except (msgspec.DecodeError, RecursionError):
        return converted(_parsed(line), decoder.type)


def _parsed(line: bytes) -> object:
    """Parse what msgspec refused: it accepts no lone surrogates, which logs with cut text have."""
    try:
        # Decoded here: json would guess at UTF-16.
        value = json.loads(line.decode().rstrip(), parse_constant=_no_number)
        # Half of a character, which no file can hold, becomes a question mark.
        return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except UnicodeDecodeError:
        raise DamagedError("is not UTF-8; save the file in UTF-8") from None
    except json.JSONDecodeError as error:
        raise DamagedError(f"malformed JSON at column {error.colno} ({error.msg})") from None
    except ValueError as error:
        raise DamagedError(f"not readable as JSON ({error})") from None


def _no_number(constant: str) -> NoReturn:
    raise DamagedError(f"holds {constant}, which JSON does not have")


def converted(value: object, kind: type[T]) -> T:
    """A parsed JSON value as a struct. Raises DamagedError with a message for users."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise DamagedError(_field_first(str(error))) from None
    except RecursionError:
        raise DamagedError("is nested too deeply") from None


def _field_first(message: str) -> str:
    """msgspec's message with the field first, as in Heddle's other messages."""
    match = re.fullmatch(r"(.*) - at `(?:key in )?\$\.?(.*)`", message, re.DOTALL)
    text, where = match.groups() if match else (message, "")
    missing = re.fullmatch(r"Object missing required field `(.*)`", text)
    if missing:
        field = f"{where}.{missing[1]}" if where else missing[1]
        return f"{field} is missing"
    text = text[:1].lower() + text[1:].replace("`", "")
    return f"{where}: {text}" if where else text


def _stem(name: str) -> str:
    for suffix in (".gz", ".jsonl", ".json", ".traj", ".eval", ".csv"):
        name = name.removesuffix(suffix) or name
    return name


@contextmanager
def _as_trace_error(path: Path) -> Iterator[None]:
    """Report failures of the disk and of permissions as a TraceError about the file."""
    try:
        yield
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from None


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        archive = zipfile.ZipFile(path)
    except (*BREAKS, ValueError, struct.error) as error:
        raise TraceError(f"{path}: the zip archive is damaged ({error}); copy it again") from None
    with archive:
        yield archive


def _unpacked(archive: zipfile.ZipFile, name: str) -> bytes:
    info = archive.getinfo(name)
    if info.flag_bits & 1:
        raise DamagedError("is encrypted; unpack the archive with its password first")
    if info.file_size > MAX_MEMBER_BYTES:
        raise DamagedError(f"unpacks to {info.file_size:,} bytes; {MAX_MEMBER_BYTES:,} at most")
    try:
        return archive.read(name)
    except BREAKS as error:
        raise DamagedError(break_message(error)) from None
    except (ValueError, struct.error, OSError, LZMAError) as error:
        # A wrong place, size or method in its directory.
        raise DamagedError(f"is damaged ({error}); copy it again") from None


def break_message(error: BaseException) -> str:
    """A user's message for an error of `BREAKS`; the data before it was sound."""
    match error:
        case EOFError():
            return "the gzip data ends too early: the file was cut off; copy it again"
        case gzip.BadGzipFile():
            return f"the gzip data is damaged ({error}); copy it again"
        case zlib.error():
            return f"the packed data is damaged ({error}); copy it again"
        case NotImplementedError():
            return f"is packed in a way that Python cannot read ({error}); pack it with deflate"
        case UnicodeDecodeError():
            return "is not UTF-8 from here on; save the file in UTF-8"
        case zipfile.BadZipFile():
            return f"is damaged ({str(error)[:_QUOTED]}); copy it again"
        case _:
            text = error.args[0] if error.args else ""  # bytes where it quotes what is no text
            return _json_fault(text.decode(errors="replace") if isinstance(text, bytes) else text)


def _json_fault(message: str) -> str:
    """A user's message for an error of ijson's parser."""
    if "premature EOF" in message:
        return "the JSON document ends too early: the file was cut off; copy it again"
    if "UTF8" in message:
        return "is not UTF-8 from here on; save the file in UTF-8"
    if re.search(r"\bNaN\b|\bInfinity\b", message):
        return "holds NaN or Infinity, which JSON does not have; nothing after it can be read"
    fault = message.partition("\n")[0].rpartition(":")[2].strip(" .'")
    return f"malformed JSON ({fault}); nothing after it can be read"
