"""Python's garbage collector, run seldom where most objects live as long as the run."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
