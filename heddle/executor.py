"""Runs jobs: in this process, or in others. Every pool of the package is made here.

`heddle.ray.executor` runs them on a cluster. Jobs and results are picklable, a job reads only
its arguments, and results come as jobs finish. Jobs have one object in common, such as a workspace
with a trace. Other processes get a copy of it whose arrays are read-only and in one shared memory.
"""

import multiprocessing
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from multiprocessing.context import BaseContext
from multiprocessing.synchronize import Event
from operator import setitem
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeAlias, TypeVar

from heddle.signals import Interrupts, WorkerSignals, interrupt, terminal_signals_blocked

POLL_S = 0.2
"""Seconds between two reads of the progress of jobs in other processes."""

ALIGNMENT = 8
"""Bytes to which an array in shared memory is aligned."""

PRELOADED = ("heddle.simulation", "heddle.search.jobs")
"""Modules that the server of `_context` imports for all processes that it forks."""
OF_LOOPS = "heddle.loops.comparison"
"""Another, where this process has imported it."""

J = TypeVar("J")
R = TypeVar("R")
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
P = ParamSpec("P")

Report: TypeAlias = Callable[[int], None]
"""Called by a job with the amount that is done."""
OnProgress: TypeAlias = Callable[[Sequence[int]], None]
"""Called with the amount of each job that is done, in the order of the jobs."""


class WorkerError(RuntimeError):
    """A worker process was killed, or its job ended in an error that cannot be sent from there."""


class Executor(Protocol[S_co]):
    def map(
        self,
        function: Callable[[S_co, J, Report | None], R],
        jobs: Sequence[J],
        on_progress: OnProgress | None = None,
    ) -> Iterator[tuple[int, R]]:
        """Yield the index of each job and its result as jobs finish.

        An exception, from a job or from the caller, stops the rest: no other job begins.

        Raises:
            WorkerError: the process of a job was killed, or its error cannot be pickled.
        """
        ...


class InProcess(Generic[S]):
    """One job after the other, in this process."""

    def __init__(self, shared: S) -> None:
        self._shared = shared

    def map(
        self,
        function: Callable[[S, J, Report | None], R],
        jobs: Sequence[J],
        on_progress: OnProgress | None = None,
    ) -> Iterator[tuple[int, R]]:
        done = [0] * len(jobs)
        for index, job in enumerate(jobs):
            report = None if on_progress is None else _reporter(done, index, on_progress)
            yield index, function(self._shared, job, report)


class Processes(Generic[S]):
    """As many jobs at once as there are processes."""

    def __init__(self, processes: int, shared: S, *, interrupts: Interrupts = "relayed") -> None:
        """`shared` is picklable; a job finds it as it is when `map` is called."""
        self._processes, self._shared = processes, shared
        self._interrupts: Interrupts = interrupts

    def map(
        self,
        function: Callable[[S, J, Report | None], R],
        jobs: Sequence[J],
        on_progress: OnProgress | None = None,
    ) -> Iterator[tuple[int, R]]:
        context = _context()
        # Without a lock, which a killed process would hold: each number has one writer.
        counts = context.RawArray("q", len(jobs)) if on_progress else None
        with terminal_signals_blocked():  # the first semaphore starts a process
            stop = context.Event()
            shared = Packed(self._shared, context)
            pool = _pool(context, self._processes, stop, self._interrupts, shared, counts)
        others = set(multiprocessing.active_children())
        polling = _polling(counts, on_progress)
        try:
            with terminal_signals_blocked(), _started_for(function):
                index_of = {
                    pool.submit(_in_worker, function, index, job): index
                    for index, job in enumerate(jobs)
                }
            for future in as_completed(index_of):
                result = future.result()
                if on_progress is not None and counts is not None:
                    on_progress(list(counts))  # a short job ends between two polls
                yield index_of[future], result
        except BrokenProcessPool:
            raise WorkerError(
                "a process was killed before its run was done, perhaps for lack of memory: "
                "run again with fewer --jobs"
            ) from None
        except BaseException:
            # The flag before the signal: a process that is not yet ready for the signal reads it.
            stop.set()
            if self._interrupts == "relayed":
                for process in set(multiprocessing.active_children()) - others:
                    if process.pid is not None:
                        interrupt(process.pid)
            raise
        finally:
            polling.set()
            pool.shutdown(wait=True, cancel_futures=True)


class Worker:
    """One other process, for calls that come one by one; a context manager that waits for it."""

    def __init__(self, interrupts: Interrupts) -> None:
        context = _context()
        with terminal_signals_blocked():
            stop, shared = context.Event(), Packed(None, context)
            self._pool = _pool(context, 1, stop, interrupts, shared, None)

    def submit(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> "Future[R]":
        with terminal_signals_blocked(), _started_for(function):
            return self._pool.submit(_in_worker, _call, 0, partial(function, *args, **kwargs))

    def close(self, *, wait: bool = False) -> None:
        """End the process once its call has ended; no other call begins."""
        self._pool.shutdown(wait=wait, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the process to end."""
        self.close(wait=True)


class Packed:
    """An object in shared memory, for processes that start: its pickle, and apart its arrays."""

    def __init__(self, content: object, context: BaseContext) -> None:
        arrays: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(content, protocol=5, buffer_callback=arrays.append)
        parts = [memoryview(pickled), *(array.raw() for array in arrays)]
        ends = accumulate(-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts)
        edges = [0, *ends]
        self._memory = context.RawArray("B", edges[-1])
        self._spans = [(at, at + part.nbytes) for at, part in zip(edges, parts, strict=False)]
        memory = self._view()
        for (begin, end), part in zip(self._spans, parts, strict=True):
            memory[begin:end] = part

    def unpacked(self) -> Any:
        """A copy of the object; its arrays are read-only and in the shared memory."""
        memory = self._view().toreadonly()
        pickled, *arrays = (memory[begin:end] for begin, end in self._spans)
        return pickle.loads(pickled, buffers=arrays)

    def _view(self) -> memoryview:
        return memoryview(self._memory).cast("B")


def _call(_: None, job: Callable[[], R], report: Report | None) -> R:
    """A job that is a call of its own."""
    return job()


def _reporter(done: list[int], index: int, on_progress: OnProgress) -> Report:
    def report(count: int) -> None:
        done[index] = count
        on_progress(done)

    return report


def _polling(counts: Any, on_progress: OnProgress | None) -> threading.Event:
    """Read the counts of worker processes from time to time, until the event is set."""
    over = threading.Event()
    if on_progress is not None:

        def poll() -> None:
            while not over.wait(POLL_S):
                on_progress(list(counts))

        threading.Thread(target=poll, daemon=True).start()
    return over


def _context() -> Any:
    """The way in which processes start: forked by a server, which is spawned once.

    A copy of a process that runs threads, as this one may, can hang. The server has imported
    `PRELOADED` and does nothing else: a process of its own starts in 10 ms and not in 600, and with
    4 MB of its own and not with 60. Where forks of a process with libraries fail, as on macOS, each
    is spawned.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *({OF_LOOPS} & sys.modules.keys())])
    return context


@contextmanager
def _started_for(function: Callable[..., object]) -> Iterator[None]:
    """Start processes that import the program again only if the function is of it.

    So a script that calls functions of ours needs no ``if __name__ == "__main__":``.
    """
    main = sys.modules["__main__"]
    if getattr(getattr(function, "func", function), "__module__", None) == "__main__":
        yield
        return
    kept: dict[str, Any] = {
        name: vars(main)[name] for name in ("__file__", "__spec__") if name in vars(main)
    }
    vars(main).pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(kept)


def _pool(
    context: Any,
    processes: int,
    stop: Event,
    interrupts: Interrupts,
    shared: Packed,
    counts: Any,
) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        processes,
        mp_context=context,
        initializer=_start,
        initargs=(stop, interrupts, shared, counts),
    )


# -- in a worker process ----------------------------------------------------------------------


class _Process:
    """The state of a worker process."""

    def __init__(self, stop: Event, interrupts: Interrupts, shared: Packed, counts: Any) -> None:
        self.signals = WorkerSignals(stop, interrupts)
        self.shared = shared.unpacked()
        self.counts = counts


_process: _Process | None = None
"""Set once, when a worker process starts."""


def _start(*args: Any) -> None:
    global _process
    _process = _Process(*args)


def _in_worker(function: Callable[[Any, J, Report | None], R], index: int, job: J) -> R:
    assert _process is not None, "a worker process is started by `_pool`"
    counts = _process.counts
    report = None if counts is None else partial(setitem, counts, index)
    try:
        with _process.signals.job():
            return function(_process.shared, job, report)
    except Exception as error:
        if _returns(error):
            raise
        failure = WorkerError(f"{type(error).__name__}: {error}")
        failure.add_note("".join(traceback.format_exception(error)).rstrip())
        raise failure from None


def _returns(error: Exception) -> bool:
    """Whether an error can be sent to another process; one of a policy may hold anything."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True
