"""The files of a finished run as its manifest lists them: size, sha256, and rows of its tables.

A run that was copied in part, or whose files were replaced, is refused in one message.
"""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import NotRequired, TypedDict

import pyarrow.parquet as pq

from heddle.runs import files
from heddle.runs.files import RunError


class WrittenFile(TypedDict):
    """A file of a run directory when the run finished."""

    bytes: int
    sha256: str
    rows: NotRequired[int]
    """Of a table in Parquet."""


def list_files(folder: Path) -> dict[str, WrittenFile]:
    """List the files in a run directory but its manifest; those in folders inside it are left out.

    Raises:
        OSError: one cannot be read.
    """
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != files.MANIFEST:
            size = path.stat().st_size
            found[path.name] = WrittenFile(bytes=size, sha256=_hash(path, size))
            if path.suffix == ".parquet":
                found[path.name]["rows"] = _rows(path)
    return found


def check_sizes(folder: Path, listed: Mapping[str, WrittenFile]) -> None:
    """Compare sizes, and the numbers of rows of tables, with those listed.

    Raises:
        RunError: a file is not there, or another one is in its place.
    """
    for name, was in listed.items():
        path = _inside(folder, name)
        if not path.is_file():
            raise RunError(f"{path}: is missing, or no file; copy the run again, or run it again")
        size = path.stat().st_size
        if size != was["bytes"]:
            raise RunError(_replaced(path, f"{size:,} bytes, and", f"{was['bytes']:,}"))
        if "rows" in was and (rows := _rows(path)) != was["rows"]:
            raise RunError(_replaced(path, f"{rows:,} rows, and", f"{was['rows']:,}"))


def check_hashes(folder: Path, listed: Mapping[str, WrittenFile]) -> None:
    """Compare the content of every listed file, of which all have the listed size.

    Raises:
        RunError: one is not what the run wrote.
    """
    for name, was in listed.items():
        path = _inside(folder, name)
        with files.readable(path):
            found = _hash(path, was["bytes"])
        if found != was["sha256"]:
            what = f"sha256 {found[:16]}, and"
            raise RunError(_replaced(path, what, f"sha256 {was['sha256'][:16]}"))


def _inside(folder: Path, name: str) -> Path:
    if name != Path(name).name:
        raise RunError(f"{folder / files.MANIFEST}: damaged: {name!r} is no file of this folder")
    return folder / name


def _replaced(path: Path, has: str, listed: str) -> str:
    return (
        f"{path}: damaged: it has {has} {files.MANIFEST} lists {listed}; "
        "copy the run again, or run it again"
    )


def _rows(path: Path) -> int:
    with files.readable(path), files.opened(path) as file:
        rows: int = pq.read_metadata(file).num_rows
        return rows


def _hash(path: Path, size: int) -> str:
    """The sha256 of at most `size` bytes: the file of another may not end."""
    digest = sha256()
    with path.open("rb") as file:
        while size > 0 and (chunk := file.read(min(size, 1 << 20))):
            digest.update(chunk)
            size -= len(chunk)
    return digest.hexdigest()
