"""Task files of live agents: one JSON object a line, checked strictly."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from heddle_trace.limits import Name

_MAX_BYTES: Final = 1 << 30
_Prompt = Annotated[str, msgspec.Meta(max_length=10_000_000, pattern=r"\S")]

_EXPECTED: Final = {
    "id": "a text of 1 to 1,000 characters, unique in the file",
    "prompt": "a text of 1 to 10,000,000 characters, not all of them space",
    "group": "a text of 1 to 1,000 characters, or leave it out: the samples of a task are a group",
    "task": "a text of 1 to 1,000 characters that names the kind of task, or leave it out",
    "answer": "a text, also for numbers, or leave it out",
}


class TaskFileError(ValueError):
    """A task file that cannot be used; the message names the file, the line and the field."""


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt."""

    id: Name
    prompt: _Prompt
    group: Name | None = None
    """Tasks may share one; None: its own."""
    task: Name = "live"
    """The kind of task, which policies and tables distinguish."""
    answer: str | None = None
    """The right answer, if known; never shown to the model."""


@dataclass(frozen=True, slots=True)
class TaskFile:
    """Named after its file, without .jsonl. `sha256` is over its bytes."""

    name: str
    tasks: tuple[Task, ...]
    sha256: str


def read_tasks(path: str | Path) -> TaskFile:
    """Read and check a task file; empty lines are skipped.

    Raises:
        TaskFileError: the first fault.
    """
    path = Path(path)
    data = _load(path)
    try:
        data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _fault(path, line, f"not UTF-8 at byte {error.start}; save it in UTF-8") from None
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for number, line_bytes in enumerate(data.split(b"\n"), start=1):
        if not line_bytes or line_bytes.isspace():
            continue
        task = _task(path, number, line_bytes)
        first = seen.setdefault(task.id, number)
        if first != number:
            message = f"id: {task.id!r} is taken by line {first} already; give every task its own"
            raise _fault(path, number, message)
        tasks.append(task)
    if not tasks:
        raise TaskFileError(f"{path}: holds no tasks; write one JSON object a line")
    return TaskFile(
        path.name.removesuffix(".jsonl"), tuple(tasks), hashlib.sha256(data).hexdigest()
    )


def _load(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise TaskFileError(f"{path}: is a folder; name the .jsonl file in it")
        if path.exists() and not path.is_file():
            raise TaskFileError(f"{path}: is a pipe or a device; save it to a file")
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise TaskFileError(f"{path}: no such file; check the path") from None
    except (OSError, ValueError) as error:
        if isinstance(error, TaskFileError):
            raise
        raise TaskFileError(f"{path}: cannot be read ({error})") from None
    if data.startswith(b"\x1f\x8b"):
        raise TaskFileError(f"{path}: is compressed; unpack it first")
    if len(data) > _MAX_BYTES:
        raise TaskFileError(f"{path}: is larger than {_MAX_BYTES >> 30} GiB; split it")
    return data


def _task(path: Path, number: int, line: bytes) -> Task:
    if line.startswith(b"\xef\xbb\xbf"):
        raise _fault(path, number, "starts with a byte-order mark; save the file without one")
    try:
        return msgspec.json.decode(line, type=Task)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _fault(path, number, next(_faults(line), f"{error}")) from None


def _faults(line: bytes) -> Iterator[str]:
    """Faults of a line, more exact than the decoder's message."""
    try:
        parsed: Any = json.loads(line)
    except json.JSONDecodeError as error:
        yield f"malformed JSON at column {error.colno} ({error.msg}); give one whole JSON object"
        return
    except (ValueError, RecursionError) as error:
        yield f"not readable as JSON ({error}); give one small JSON object"
        return
    if not isinstance(parsed, dict):
        yield f"found {_shown(parsed)}; give a JSON object"
        return
    for field in msgspec.structs.fields(Task):
        if field.name not in parsed:
            if field.required:
                yield f"{field.name}: is missing; give {_EXPECTED[field.name]}"
            continue
        try:
            msgspec.convert(parsed[field.name], field.type)
        except msgspec.ValidationError:
            yield f"{field.name}: found {_shown(parsed[field.name])}; give {_EXPECTED[field.name]}"
    for name in parsed:
        if name not in _EXPECTED:
            yield f"{_shown(name)} is not a field of a task; there are {', '.join(_EXPECTED)}"


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _fault(path: Path, line: int, message: str) -> TaskFileError:
    return TaskFileError(f"{path}: line {line}: {message}")
