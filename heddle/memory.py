"""What a process asks of Python and Linux for the many small objects of a simulation.

A step of a large rollout reads dozens of objects that no cache holds, and with pages of 4 KiB the
processor has to find most of their addresses in memory, too.
"""

import ctypes
import gc
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EBUSY, ENOMEM
from pathlib import Path
from typing import Final

COLLECT_EVERY: Final = 200_000
"""New objects of a simulation between two collections of garbage: it makes few cycles."""
GROWN_BYTES: Final = 32 << 20
"""More memory than before, of which large pages are made."""
PAGE: Final = 2 << 20
"""Bytes of a large page."""
CALL_BYTES: Final = 128 * PAGE
"""Of one call: signals wait for its end, and Linux asks all processors for their pages in each."""
MADV_COLLAPSE: Final = 25
"""Linux 6.1's advice: make large pages of small ones at once, whatever the system's setting is."""


@contextmanager
def many_objects() -> Iterator[None]:
    """What a simulation runs in: garbage is collected seldom, and objects are in large pages.

    What a large one leaves is given back to the system: its parts refer to each other, and what
    comes after it would take as much memory again.
    """
    before = _resident_bytes()
    with seldom_collected(COLLECT_EVERY), large_pages():
        yield
    if _resident_bytes() - before >= GROWN_BYTES:
        gc.collect()
        # It keeps names that C code made for one call, all over the memory. The second is that of
        # Python before 3.13; 3.14 warns of it.
        getattr(sys, "_clear_internal_caches", getattr(sys, "_clear_type_cache", int))()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        if trim is not None:
            trim(0)


@contextmanager
def seldom_collected(every: int, *, old_every: int = 10) -> Iterator[None]:
    """Collect once in `every` new objects, not once in 700, and older ones in `old_every` of these.

    A run makes few cycles, but holds many small objects: the collector took a sixth of the time of
    a simulation, and held up a gateway for 0.1 s. What is there already, such as modules and the
    trace, is left out of its scans.
    """
    usual = gc.get_threshold()
    gc.set_threshold(every, old_every, usual[2])
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)


@contextmanager
def large_pages() -> Iterator[None]:
    """Put what this process allocates inside the block into large pages, where Linux has them.

    That is done at collections of garbage after which there are `GROWN_BYTES` more: what processes
    share with those that they came from stays shared where they stay small.
    """
    before = _resident_bytes()

    def collected(phase: str, info: dict[str, int]) -> None:
        nonlocal before
        if phase == "stop" and _resident_bytes() - before >= GROWN_BYTES:
            with suppress(OSError):
                collapse()
            before = _resident_bytes()

    gc.callbacks.append(collected)
    try:
        yield
    finally:
        gc.callbacks.remove(collected)


def _resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say it as Linux does."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def collapse() -> None:
    """Make large pages of the memory that this process has, as far as Linux can.

    Raises:
        OSError: the system does not say where that is.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    for line in Path("/proc/self/maps").read_bytes().split(b"\n")[:-1]:
        begin_end, access, _, _, _, *name = line.split(maxsplit=5)
        if access != b"rw-p" or name not in ([], [b"[heap]"]):
            continue
        begin, end = (int(each, 16) for each in begin_end.split(b"-"))
        for address in range(-(-begin // PAGE) * PAGE, end, CALL_BYTES):
            size = ctypes.c_size_t(min(CALL_BYTES, end - address))
            failed = madvise(ctypes.c_void_p(address), size, MADV_COLLAPSE)
            if failed and ctypes.get_errno() in (ENOMEM, EBUSY):
                return  # Linux moves memory about for each page, and found no room
