"""Files of a run directory: written whole or not at all, and read with care.

It has names and formats, but no meaning of the numbers.
"""

import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from heddle_compiled import installed_version
from heddle_trace.writing import whole

T = TypeVar("T", pa.Table, pa.RecordBatch)

MANIFEST = "manifest.json"
CONFIG_GIVEN = "config.toml"
CONFIG_RESOLVED = "config.resolved.json"
CONTEXT = "context.json"
JOURNAL = "events.arrow"
STEPS = "steps.parquet"
TRAJECTORIES = "trajectories.parquet"
SUMMARY = "summary.json"
RL_STEPS = "rl_steps.json"
"""Of a loop alone."""


class RunError(ValueError):
    """A run directory that cannot be used; the message says why and what to do."""


def check_out(out: Path) -> None:
    """Check that runs can be put into `out`, which need not be there.

    Raises:
        RunError: `out` has no parent directory, or is a file.
    """
    if out.exists() and not out.is_dir():
        raise RunError(f"{out}: is a file, not a directory for runs; choose another with --out")
    if not out.absolute().parent.is_dir():
        raise RunError(f"{out.parent}: no such directory; make it first or choose another --out")


def new_folder(out: Path, name: str) -> Path:
    """Make a folder in `out` of this name, with a number behind it if it is taken.

    Two that are made at once are two.

    Raises:
        RunError: too many are there.
        OSError: it cannot be made.
    """
    for attempt in range(1, 10_000):
        path = out / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
        except BaseException:
            # An interrupt may come after the directory is made. Only an empty one is removed.
            with suppress(OSError):
                path.rmdir()
            raise
    raise RunError(f"{out}: 10,000 runs called {name} are there already; choose another --out")


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file complete or not at all."""
    with whole(path) as file:
        write(file)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write an object, keys in the order given. NaN is an error, since JSON has none."""
    text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # A file name that is not UTF-8 has lone surrogates; escaped, JSON gives them back as they are.
    write_whole(path, lambda file: file.write(text.encode(errors="backslashreplace")))


@contextmanager
def written_table(path: Path) -> Iterator[Callable[[pa.Table], None]]:
    """Write a table as Parquet, in as many parts as are given; whole at the end or not at all."""
    with ExitStack() as open_files:
        file = open_files.enter_context(whole(path))
        writer: pq.ParquetWriter | None = None

        def write(table: pa.Table) -> None:
            nonlocal writer
            if writer is None:
                words: Any = [f.name for f in table.schema if pa.types.is_dictionary(f.type)]
                writer = pq.ParquetWriter(
                    file,
                    table.schema,
                    compression="zstd",
                    use_dictionary=words,
                    write_statistics=False,
                )
                open_files.enter_context(writer)
            writer.write_table(table)

        yield write


def read_json(path: Path) -> dict[str, Any]:
    """Read an object.

    Raises:
        RunError: it is missing or damaged.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path}: no such file") from None
    except PermissionError:
        raise RunError(f"{path}: permission denied; change its permissions") from None
    except (ValueError, RecursionError) as e:
        raise RunError(f"{path}: damaged: {e}") from None
    if not isinstance(values, dict):
        raise RunError(f"{path}: damaged: not a JSON object")
    return values


def read_table(path: Path, needed: Sequence[str] = (), *, numbers: Sequence[str] = ()) -> pa.Table:
    """Read a Parquet table that has at least the columns `needed`, and the columns `numbers`.

    Raises:
        RunError: it is missing or damaged.
    """
    with readable(path), opened(path) as file:
        table = checked(path, pq.ParquetFile(file).read(), (*needed, *numbers))
    for name in numbers:
        kind = table.schema.field(name).type
        if not pa.types.is_floating(kind) and not pa.types.is_integer(kind):
            raise RunError(
                f"{path}: damaged: its column {name!r} is of type {kind}, not of numbers"
            )
    return table


def opened(path: Path) -> pa.MemoryMappedFile:
    """Open a file for pyarrow, which takes no name that is not UTF-8, but its bytes."""
    name: Any = os.fsencode(path)
    return pa.memory_map(name)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn errors of reading a table into `RunError`."""
    try:
        yield
    except FileNotFoundError:
        raise RunError(f"{path}: no such file") from None
    except PermissionError:
        raise RunError(f"{path}: permission denied; change its permissions") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as e:  # the last: of a name of a column
        raise RunError(f"{path}: damaged: {e}") from None


def checked(path: Path, table: T, needed: Sequence[str]) -> T:
    """Return a table that was read from `path` if it has the columns `needed`."""
    there = set(table.schema.names)
    absent = [name for name in needed if name not in there]
    if absent:
        raise RunError(f"{path}: damaged: it has no column {absent[0]!r}")
    return table


def versions() -> dict[str, str]:
    """Versions of packages that could change a result."""
    packages = ("numpy", "simpy", "pyarrow")
    return {
        "python": platform.python_version(),
        "heddle": installed_version(),
        **{name: installed_version(name) for name in packages},
    }


@cache
def git_commit() -> str | None:
    """Commit of the checkout that this code runs from, "+changes" when it differs; else None."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, timeout=5.0)
        diff = subprocess.run(
            [*git, "diff", "--quiet", "HEAD", "--", "*.py", "*.json"],
            capture_output=True,
            timeout=5.0,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if head.returncode:
        return None
    return head.stdout.decode().strip() + ("+changes" if diff.returncode else "")


def host() -> dict[str, Any]:
    """Facts of the machine that affect speed."""
    return {
        "name": socket.gethostname(),
        "platform": f"{sys.platform} {platform.machine()}",
        "cores": os.cpu_count(),
    }
