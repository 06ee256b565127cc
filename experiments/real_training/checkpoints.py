"""Checkpoints of a trainer: one folder for each trained batch, complete or absent."""

import shutil
from collections.abc import Collection
from pathlib import Path

_PREFIX, _PARTIAL = "batch-", ".partial"


def checkpoint(folder: Path, batch: int) -> Path:
    """Where the weights after a batch are."""
    return folder / f"{_PREFIX}{batch:06}"


def partial(folder: Path, batch: int) -> Path:
    """Where they are while they are written."""
    return folder / f"{_PREFIX}{batch:06}{_PARTIAL}"


def newest(folder: Path) -> int | None:
    """The last batch with a complete checkpoint; None: there is none."""
    return max(_complete(folder), default=None)


def remove_but(folder: Path, keep: Collection[int]) -> None:
    """Remove complete checkpoints of other batches."""
    for batch in _complete(folder):
        if batch not in keep:
            shutil.rmtree(checkpoint(folder, batch), ignore_errors=True)


def _complete(folder: Path) -> list[int]:
    names = [path.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*")]
    return [int(name) for name in names if name.isdecimal()]
