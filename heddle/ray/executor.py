"""Runs jobs as tasks of a Ray cluster, on all of its nodes; see `heddle.executor` for the others.

Jobs write their run directories themselves: the nodes need a file system in common.
"""

import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from heddle.executor import OnProgress, Report, WorkerError
from heddle.ray.cluster import connected

POLL_S = 0.5
"""Seconds between two reads of progress, and between two reports of a job."""
CANCEL_S = 10.0
"""Seconds that jobs get to close their runs after an error or an interrupt."""

J = TypeVar("J")
R = TypeVar("R")
S = TypeVar("S")


def shared_by_tasks(shared: object) -> Any:
    """Put an object into the store of the Ray cluster, once for tasks of several calls.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers at RAY_ADDRESS.
    """
    return connected("runtime.executor = ray").put(shared)


class RayTasks(Generic[S]):
    """Each job is a task of one core, on a node that Ray chooses."""

    def __init__(self, shared: S, *, at_once: int | None = None, out: Path | None = None) -> None:
        """`shared`: any object, or one of `shared_by_tasks`. `at_once`: tasks that are submitted at
        once; None: all, and Ray queues them.

        `out` is the folder that jobs write into, if they do: a node that does not see it fails its
        jobs.

        Raises:
            ConfigError: Ray is not installed, or no cluster answers at RAY_ADDRESS.
        """
        self._ray = connected("runtime.executor = ray")
        self._shared, self._at_once, self._out = shared, at_once, out

    def map(
        self,
        function: Callable[[S, J, Report | None], R],
        jobs: Sequence[J],
        on_progress: OnProgress | None = None,
    ) -> Iterator[tuple[int, R]]:
        """See `Executor.map`. A job of a node that dies runs again on another."""
        ray = self._ray
        shared = self._shared
        if not isinstance(shared, ray.ObjectRef):
            shared = ray.put(shared)
        counts = self._counts(len(jobs)) if on_progress else None
        task = ray.remote(_in_task).options(num_cpus=1, max_retries=3)
        index_of: dict[Any, int] = {}
        waiting = iter(enumerate(jobs))
        try:
            with _Marker(self._out) as marker:
                while True:
                    while self._at_once is None or len(index_of) < self._at_once:
                        index, job = next(waiting, (-1, None))
                        if index < 0:
                            break
                        ref = task.remote(shared, function, index, job, counts, marker)
                        index_of[ref] = index
                    if not index_of:
                        return
                    done, _ = ray.wait(list(index_of), timeout=POLL_S if counts else None)
                    if on_progress is not None and counts is not None:
                        on_progress(ray.get(counts.all.remote()))
                    for ref in done:
                        yield index_of.pop(ref), self._result(ref)
        except BaseException:
            self._cancel(list(index_of))
            raise
        finally:
            if counts is not None:
                ray.kill(counts)

    def _counts(self, jobs: int) -> Any:
        """An actor of `_Counts`, on this node: it lives as long as what reads it."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(
            self._ray.get_runtime_context().get_node_id(), soft=False
        )
        made = self._ray.remote(_Counts).options(num_cpus=0, scheduling_strategy=here)
        return made.remote(jobs)

    def _result(self, ref: Any) -> Any:
        ray = self._ray
        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from None
            raise WorkerError(f"a task of Ray ended in an error: {error}") from None
        except ray.exceptions.RayError as error:
            raise WorkerError(f"Ray could not run a job: {error}") from None

    def _cancel(self, refs: Sequence[Any]) -> None:
        """Interrupt what runs, and wait a while: an interrupted job closes its run."""
        for ref in refs:
            self._ray.cancel(ref)
        if refs:
            self._ray.wait(list(refs), num_returns=len(refs), timeout=CANCEL_S)


class _Marker:
    """A file in the folder of run directories, while tasks run: nodes prove by it that they see it.

    A context manager that gives its path, or "" without a folder.
    """

    def __init__(self, out: Path | None) -> None:
        self._path = None if out is None else out.resolve() / f".ray-{uuid.uuid4().hex}"

    def __enter__(self) -> str:
        if self._path is None:
            return ""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch()
        return str(self._path)

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


# -- on a node --------------------------------------------------------------------------------


class _Counts:
    """An actor that has the amount of each job that is done."""

    def __init__(self, jobs: int) -> None:
        self._counts = [0] * jobs

    def put(self, index: int, count: int) -> None:
        self._counts[index] = count

    def all(self) -> list[int]:
        return self._counts


class _Reporter:
    """Sends the amount of one job from time to time, and its last one at the end."""

    def __init__(self, send: Callable[[int], object]) -> None:
        self._send, self._due_s = send, 0.0
        self._unsent: int | None = None

    def __call__(self, count: int) -> None:
        now_s = time.monotonic()
        self._unsent = count
        if now_s >= self._due_s:
            self._due_s = now_s + POLL_S
            self.last()

    def last(self) -> None:
        """Send what was held back."""
        if self._unsent is not None:
            self._send(self._unsent)
            self._unsent = None


def _in_task(
    shared: S,
    function: Callable[[S, J, Report | None], R],
    index: int,
    job: J,
    counts: Any,
    marker: str,
) -> R:
    node = socket.gethostname()
    if marker and not Path(marker).is_file():
        raise WorkerError(
            f"node {node} does not see {Path(marker).parent}: with runtime.executor = ray, "
            "--out must be a folder that all nodes share"
        )
    if counts is None:
        return function(shared, job, None)
    report = _Reporter(partial(_put, counts, index))
    result = function(shared, job, report)
    report.last()
    return result


def _put(counts: Any, index: int, count: int) -> None:
    """Wait until it is counted: calls of several tasks, and of the driver, have no order."""
    import ray

    ray.get(counts.put.remote(index, count))
