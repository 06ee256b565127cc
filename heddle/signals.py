"""Signals that ask a run on engines to end: heard until it is closed, whatever it is doing."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

NUMBERS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


class Terminated(KeyboardInterrupt):
    """A signal that asks to end: a run is closed as after Ctrl-C, with the signal's own status."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.status = 128 + number


class Asked:
    """Hears the signals that ask to end, as a context manager, and decides what they do.

    The first is raised where it comes, as `KeyboardInterrupt` or `Terminated`; while they are `put
    off`, at the end of that; while somebody is told, it is his to act on. None that come later are
    raised: they would break into the closing that the first has begun. A signal that is ignored,
    as under nohup, stays ignored.
    """

    def __init__(self) -> None:
        self._came: list[int] = []
        self._tell: Callable[[int], object] | None = None
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Self:
        """Listen; outside of the main thread nobody can."""
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the signals to whoever had them before."""
        for number, before in self._before.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Raise what comes inside at the end of the block, unless something else is raised."""
        with self.told_to(lambda count: None):
            yield
        if self._came:
            self._raise()

    @contextmanager
    def told_to(self, tell: Callable[[int], object]) -> Iterator[None]:
        """Call `tell` with how many signals have come, for each, and once for those before.

        It is called between any two instructions, as signal handlers are.
        """
        before, self._tell = self._tell, tell
        try:
            if self._came:
                tell(len(self._came))
            yield
        finally:
            self._tell = before

    def _hear(self, number: int, _: FrameType | None) -> None:
        self._came.append(number)
        if self._tell is not None:
            self._tell(len(self._came))
        elif len(self._came) == 1:
            self._raise()

    def _raise(self) -> None:
        number = self._came[0]
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)
