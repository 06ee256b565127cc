"""The processes that run, from /proc: to check that none is left."""

import ctypes
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 600.0
"""How long to wait for other processes: a hang ends a case, a slow machine does not."""


def _parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # gone meanwhile
            found[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    return found


def descendants(root: int | None = None, *, besides: Collection[int] = ()) -> list[int]:
    """Children of `root`, by default of this process, their children and so on; zombies too.

    Those `besides` are left out with all their children: a browser starts some when it likes.
    """
    parents = {child: parent for child, parent in _parents().items() if child not in besides}
    found = [os.getpid() if root is None else root]
    for process in found:
        found.extend(child for child, parent in parents.items() if parent == process)
    return found[1:]


def wait_until_gone(processes: list[int], limit_s: float = PATIENCE_S) -> list[int]:
    """Return those that are still there after `limit_s`, a generous one; zombies do not count."""
    until_s = time.monotonic() + limit_s
    left = processes
    while (left := [p for p in left if _alive(p)]) and time.monotonic() < until_s:
        time.sleep(0.02)
    return left


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Be the parent of processes whose own parent ends meanwhile, so that they are found."""
    set_subreaper = 36
    libc = ctypes.CDLL(None)
    libc.prctl(set_subreaper, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(set_subreaper, 0, 0, 0, 0)
