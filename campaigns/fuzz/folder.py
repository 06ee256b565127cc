"""A folder with the originals, damaged for one case and whole again for the next."""

import os
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

from campaigns.fuzz.edits import Edit, edited
from campaigns.fuzz.inputs import FOLDERS, originals


@lru_cache
def inputs() -> dict[str, bytes]:
    """Return the originals, and history that no change affects."""
    files = dict(originals())
    return files | {"h.jsonl": files["in.jsonl"]}


def fill(folder: Path, edits: tuple[Edit, ...] = ()) -> None:
    """Write the originals, changed."""
    for name, data in damaged(edits, inputs()).items():
        _write(folder / name, data)


def damaged(edits: tuple[Edit, ...], files: dict[str, bytes]) -> dict[str, bytes | None]:
    """Return files after their changes; None: the file is not there."""
    changed: dict[str, bytes | None] = {**files}
    for edit in edits:
        data = changed[edit.file]
        if data is not None:
            changed[edit.file] = edited(data, edit)
    return changed


class Workplace:
    """The folder of a process: a case writes what it damages, and the next one finds it whole."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="heddle-fuzz-")
        self.folder = Path(self._temporary.name)
        self._whole: dict[str, tuple[int, ...]] = {}
        """Every file that is as it was written, by its path, with what changes with its content."""
        self.restore()

    def damage(self, edits: tuple[Edit, ...]) -> None:
        """Write the changed files."""
        names = dict.fromkeys(edit.file for edit in edits)
        files = {name: inputs()[name] for name in names}
        for name, data in damaged(edits, files).items():
            self._whole.pop(name, None)
            _write(self.folder / name, data)

    def restore(self) -> None:
        """Remove what is new, and write what is missing or changed."""
        found = dict(self._found(""))
        for name, data in inputs().items():
            if found.get(name, ()) != self._whole.get(name):
                _write(self.folder / name, data)
                self._whole[name] = _state(os.stat(self.folder / name))

    def _found(self, below: str) -> list[tuple[str, tuple[int, ...]]]:
        """States of the originals that are here; all else is removed."""
        here: list[tuple[str, tuple[int, ...]]] = []
        with os.scandir(self.folder / below) as entries:
            for entry in list(entries):
                name = below + entry.name
                if entry.is_dir(follow_symlinks=False):
                    if name in FOLDERS:
                        here += self._found(name + "/")
                    else:
                        shutil.rmtree(entry.path)
                elif name in inputs():
                    here.append((name, _state(entry.stat(follow_symlinks=False))))
                else:
                    Path(entry.path).unlink()
        return here


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode


def _write(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
