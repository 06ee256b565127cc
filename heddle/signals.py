"""Signals that end a run: raised where it can be closed, and handed on to worker processes.

The only module of the package that sets handlers, signal masks and the hook for exceptions that
Python drops, or ends a process at once.
"""

import os
import signal
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Literal, NoReturn, Self, TypeAlias

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

NUMBERS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]

Interrupts: TypeAlias = Literal["relayed", "direct", "ignored"]
"""Effect of SIGINT on a job in a worker process.

``relayed``: the parent interrupts its workers, each once; a job closes, and its process ends.
``direct``: a job handles the terminal's signal. ``ignored``: a job that has begun ends normally.
"""


AGAIN_S = 0.01
"""Seconds after which a signal is sent again whose exception Python dropped."""

_ends_process = False


@contextmanager
def first_ends_process() -> Iterator[None]:
    """Let the first signal that ends a run end this process: later ones are ignored until then."""
    global _ends_process
    others = sys.unraisablehook
    _ends_process = True
    send_dropped_again()
    try:
        yield
    finally:
        _ends_process = False
        sys.unraisablehook = others


def ignore_more() -> None:
    """Ignore signals from here on, if the first one ends this process."""
    if _ends_process and threading.current_thread() is threading.main_thread():
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)


class Terminated(KeyboardInterrupt):
    """A signal that ends the run: a run is closed as after Ctrl-C, with the signal's own status."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number, self.status = number, 128 + number


# -- exceptions that Python drops -------------------------------------------------------------

_dropped = False
"""Python dropped the exception of a signal, and no handler of this module has had another since."""


def send_dropped_again() -> None:
    """Send this process a signal again if Python drops its exception.

    A handler runs between any two instructions, so also in those that free an object (the end of
    a generator, ``__del__``, the callback of a weak reference). Python prints and drops what is
    raised there, and the command would go on as if the signal had not come.
    """
    others = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        global _dropped
        error = unraisable.exc_value
        if not isinstance(error, KeyboardInterrupt):
            others(unraisable)
            return
        number = error.number if isinstance(error, Terminated) else signal.SIGINT
        # Later, as what a hook raises is dropped too; not by `threading`, whose locks may be held.
        start_new_thread(_send_later, (number,))
        _dropped = True

    sys.unraisablehook = hook


def _send_later(number: int) -> None:
    time.sleep(AGAIN_S)
    os.kill(os.getpid(), number)


def _comes_again() -> bool:
    """Whether a dropped signal was still to come; asked by a handler, whose signal counts as it."""
    global _dropped
    dropped, _dropped = _dropped, False
    return dropped


class _First:
    """Whether a signal is the first that came, or the first again."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self) -> bool:
        first = _comes_again() or not self.came
        self.came = True
        return first


# -- in the main process ----------------------------------------------------------------------


@contextmanager
def terminate_on_signals() -> Iterator[None]:
    """Raise `Terminated` where SIGTERM or SIGHUP would end the process without a message.

    A signal that is ignored, as under nohup, stays ignored; so does a second one while the first
    closes the run.
    """
    numbers = [number for number in NUMBERS if number != signal.SIGINT]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # only the main thread may set handlers
    mine = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    first = _First()

    def end(number: int, _: object) -> None:
        if first():
            raise Terminated(number)

    for number in mine:
        signal.signal(number, end)
    try:
        yield
    except KeyboardInterrupt:
        ignore_more()
        raise
    finally:
        for number in mine:
            if signal.getsignal(number) is end or not _ends_process:
                signal.signal(number, signal.SIG_DFL)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Undo what a library does to the handlers of these signals inside."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


class StopSignals:
    """Handles the signals that end a run, as a context manager.

    The first is raised where it arrives, as `KeyboardInterrupt` or `Terminated`; inside `deferred`,
    at the end of that block; inside `on_signal`, a callback handles it. Later ones are not raised:
    they would interrupt the closing that the first has begun. A first one that comes again, see
    `send_dropped_again`, is raised, unless a callback has had it. A signal that is ignored, as
    under nohup, stays ignored.
    """

    def __init__(self) -> None:
        self.came: list[int] = []
        self._handled = False
        """A callback had the first."""
        self._callback: Callable[[int], object] | None = None
        self.on_hangup: Callable[[], object] | None = None
        """Called for SIGHUP, which then ends nothing."""
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Self:
        """Set the handlers; outside of the main thread that is not possible."""
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, KeyboardInterrupt) and _ends_process:
            ignore_more()
            return
        for number, before in self._before.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Raise a signal that arrives inside at the end of the block, unless the block raises."""
        with self.on_signal(lambda count: None):
            yield
        if self.came:
            self._raise()

    @contextmanager
    def on_signal(self, callback: Callable[[int], object]) -> Iterator[None]:
        """Call `callback` for each signal with the number so far, and once for earlier ones.

        It is called between any two instructions, as signal handlers are.
        """
        before, self._callback = self._callback, callback
        try:
            if self.came:
                self._handled = True
                callback(len(self.came))
            yield
        finally:
            self._callback = before

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.on_hangup is not None and number == signal.SIGHUP:
            self.on_hangup()
            return
        if _comes_again() and self.came:
            if not self._handled:
                self._raise()
            return
        self.came.append(number)
        if self._callback is not None:
            self._callback(len(self.came))
        elif len(self.came) == 1:
            self._raise()

    def _raise(self) -> NoReturn:
        number = self.came[0]
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)


# -- worker processes -------------------------------------------------------------------------


@contextmanager
def terminal_signals_blocked() -> Iterator[None]:
    """Start processes with SIGINT and SIGHUP blocked: what a terminal sends ends its main process,
    which ends the others in order. SIGINT would end them noisily while they import, and SIGHUP
    those that serve the others, for which it stays blocked. SIGTERM has to end a process of a pool.
    """
    blocked = (signal.SIGINT, signal.SIGHUP) if hasattr(signal, "SIGHUP") else (signal.SIGINT,)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        with _handlers_deferred(blocked):
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _handlers_deferred(numbers: Iterable[int]) -> Iterator[None]:
    """Handle signals at the end of the block: the mask of the main thread is no other thread's,
    and what another receives is handled in the main thread, at once.
    """
    came: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {n: h for n in numbers if callable(h := signal.getsignal(n))}
    for number in handlers:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)  # here, where no other thread can be late with it


def interrupt(pid: int) -> None:
    """Send SIGINT to a process."""
    os.kill(pid, signal.SIGINT)


class WorkerSignals:
    """SIGINT in a worker process: it interrupts a job, and nothing between jobs. SIGTERM interrupts
    a ``relayed`` job too, which may be closing already.

    The process ends when its parent has ended, after its job has closed. A new one starts with
    SIGINT blocked; see `terminal_signals_blocked`.
    """

    def __init__(self, stop: "Event", interrupts: Interrupts) -> None:
        """`stop` is set when no job may begin any more."""
        self._stop, self._interrupts = stop, interrupts
        self._busy = threading.Lock()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
        send_dropped_again()
        threading.Thread(target=self._end_with_parent, daemon=True).start()

    @contextmanager
    def job(self) -> Iterator[None]:
        """Let SIGINT interrupt the block, as the process's `Interrupts` say.

        Raises:
            KeyboardInterrupt: no job may begin any more, or a ``direct`` one was interrupted.
        """
        first = _First()

        def interrupt_once(*_: object) -> None:
            if first():  # a second one would interrupt the closing of the job
                raise KeyboardInterrupt

        with self._busy:
            try:
                if self._interrupts != "ignored":
                    signal.signal(signal.SIGINT, interrupt_once)
                if self._interrupts == "relayed":
                    # By SIGTERM a pool ends all its processes once one has ended.
                    signal.signal(signal.SIGTERM, interrupt_once)
                if self._stop.is_set():
                    raise KeyboardInterrupt
                yield
            except KeyboardInterrupt:
                if self._interrupts == "relayed":
                    # The job has closed, and no other begins. A process that stayed could wait for
                    # ever: the job may have taken the signal by which a pool ends its processes.
                    os._exit(1)
                raise
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _end_with_parent(self) -> None:
        # Imported here: the command line imports this module, and help needs no processes.
        import multiprocessing
        from multiprocessing import connection

        parent = multiprocessing.parent_process()
        assert parent is not None
        connection.wait([parent.sentinel])
        self._stop.set()
        if self._interrupts == "ignored":
            os._exit(1)
        os.kill(os.getpid(), signal.SIGINT)
        with self._busy:
            os._exit(1)  # no process reads the results, and the queue of jobs would wait for ever
