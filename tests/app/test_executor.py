"""Jobs in this process and in others: their results, progress, and how they end."""

import asyncio
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from campaigns.processes import descendants, wait_until_gone
from heddle.engine_stack import ProcessSolver
from heddle.executor import (
    ALIGNMENT,
    Executor,
    InProcess,
    Packed,
    Processes,
    Report,
    Worker,
    WorkerError,
)
from heddle.executor_choice import run_all
from heddle_core.commands import Predict, SolvePlan
from heddle_core.plans import ResourcePlan
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


class Shared:
    """What the jobs of one process have in common: here the jobs themselves, and an array."""

    def __init__(self) -> None:
        self.jobs: list[int] = []
        self.lengths = np.arange(1_000)


def squared(shared: Shared, job: int, report: Report | None) -> tuple[int, int, list[int]]:
    shared.jobs.append(job)
    if report is not None:
        report(job)
    return job * job, os.getpid(), list(shared.jobs)


@pytest.mark.parametrize("make", [lambda: InProcess(Shared()), lambda: Processes(2, Shared())])
def test_each_job_gives_its_result_with_its_index(make: Callable[[], Executor[Shared]]):
    found = dict(make().map(squared, [3, 1, 2]))
    assert {index: square for index, (square, _, _) in found.items()} == {0: 9, 1: 1, 2: 4}


@pytest.mark.parametrize("out", [Path("runs"), None])
def test_an_interrupt_says_how_many_runs_have_left_a_directory(out: Path | None):
    def one(shared: None, job: int, report: Report | None) -> int:
        if job == 2:
            raise KeyboardInterrupt
        return job

    with pytest.raises(KeyboardInterrupt) as ended:
        run_all("processes", None, one, [0, 1, 2], jobs=1, steps=0, out=out, watch=None)
    notes = ["2 of 3 runs are finished and stay in runs."] if out else []
    assert getattr(ended.value, "__notes__", []) == notes


def test_jobs_of_one_process_share_what_was_made_for_it():
    results = [result for _, result in Processes(1, Shared()).map(squared, [5, 6, 7])]
    assert [jobs for _, _, jobs in results] == [[5], [5, 6], [5, 6, 7]]
    (process,) = {process for _, process, _ in results}
    assert process != os.getpid()


def sum_and_flags(shared: Shared, job: int, report: Report | None) -> tuple[int, bool, bool]:
    flags = shared.lengths.flags
    return int(shared.lengths.sum()), bool(flags.writeable), bool(flags.owndata)


def test_a_process_has_no_copy_of_its_own_of_a_shared_array():
    found = dict(Processes(2, Shared()).map(sum_and_flags, [1, 2]))
    assert found == {0: (499_500, False, False), 1: (499_500, False, False)}
    packed = Packed(Shared(), multiprocessing.get_context("spawn"))
    one, two = packed.unpacked(), packed.unpacked()
    assert np.shares_memory(one.lengths, two.lengths)
    assert one.lengths.ctypes.data % ALIGNMENT == 0
    assert one.jobs is not two.jobs


@pytest.mark.parametrize("shared", [None, np.empty(0), [np.arange(3), b"", "x", np.ones((2, 3))]])
def test_what_is_packed_comes_back(shared: Any):
    back = Packed(shared, multiprocessing.get_context("spawn")).unpacked()
    assert pickle.dumps(back) == pickle.dumps(shared)


def test_progress_lists_all_jobs():
    seen: list[list[int]] = []
    list(InProcess(Shared()).map(squared, [3, 1], lambda done: seen.append([*done])))
    assert seen == [[3, 0], [3, 1]]


def wait_for(_: Shared, path: str, report: Report | None) -> str:
    """A job that ends when a file is there."""
    begins_by = time.monotonic() + PATIENCE_S
    while not Path(path).exists() and time.monotonic() < begins_by:
        time.sleep(0.01)
    return path


def test_results_come_as_jobs_end_whichever_began_first(tmp_path: Path):
    late = tmp_path / "late"
    ended = Processes(2, Shared()).map(wait_for, [str(late), str(tmp_path)])
    assert next(ended) == (1, str(tmp_path))
    late.touch()
    assert list(ended) == [(0, str(late))]


def dying(_: Shared, job: int, report: Report | None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_an_error_with_a_remedy():
    with pytest.raises(WorkerError, match="fewer --jobs"):
        list(Processes(1, Shared()).map(dying, [1]))


class TwoPartsError(ValueError):
    """Cannot be unpickled: it is made of two arguments, and has one."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


class LockedError(ValueError):
    """Cannot be pickled."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.lock = threading.Lock()


def failing(_: Shared, job: str, report: Report | None) -> None:
    raise TwoPartsError("a defect", job) if job == "two" else LockedError(f"a defect in {job}")


@pytest.mark.parametrize("job", ["two", "lock"])
def test_an_error_that_cannot_leave_its_process_is_told(job: str):
    with pytest.raises(WorkerError, match=f"Error: a defect in {job}") as found:
        list(Processes(1, Shared()).map(failing, [job]))
    assert "in failing" in found.value.__notes__[0]


class Touching(NamedTuple):
    """A job that marks its begin and its end; it fails on request, else it goes on."""

    folder: str
    fails: bool = False
    closing_s: float = 0.0


def touching(_: Shared, job: Touching, report: Report | None) -> None:
    folder = Path(job.folder)
    try:
        if job.fails:
            while not (folder / "began").exists():
                time.sleep(0.01)
            raise ValueError("a defect")
        (folder / "began").touch()
        time.sleep(60.0)
    finally:
        time.sleep(job.closing_s)
        (folder / f"closed{job.fails}").touch()


def test_an_error_closes_the_jobs_under_way(tmp_path: Path):
    last = tmp_path / "last"
    last.mkdir()
    # While the first closes, the process of the others has ended, and with it the pool.
    first = Touching(str(tmp_path), closing_s=0.5)
    jobs = [first, Touching(str(tmp_path), fails=True), Touching(str(last))]
    with pytest.raises(ValueError, match="a defect"):
        list(Processes(2, Shared()).map(touching, jobs))
    assert (tmp_path / "closedFalse").exists()
    assert not list(last.iterdir()) or (last / "closedFalse").exists()


class Interrupting:
    """Interrupts its process while Python frees it."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)  # Python calls the handler here at the latest


def going_on() -> str:
    Interrupting()
    for _ in range(6000):
        time.sleep(0.01)
    return "not interrupted"


def test_an_interrupt_that_python_drops_still_ends_a_job():
    with Worker("direct") as worker, pytest.raises(KeyboardInterrupt):
        worker.submit(going_on).result()


# -- plans that are searched for in another process -------------------------------------------


class Slow(NamedTuple):
    """A problem whose search takes a while, and reports its start."""

    seconds: float
    begun: str
    charged_s: float = 0.0

    def solve(self) -> ResourcePlan:
        Path(self.begun).write_text("")
        time.sleep(self.seconds)
        return ResourcePlan(engines=())


class Answer:
    """Takes the answer of one search; implements `ServiceListener`."""

    def __init__(self) -> None:
        self.plan: asyncio.Future[ResourcePlan] = asyncio.get_running_loop().create_future()

    def predicted(self, command: Predict, remaining_tokens: float | None) -> None:
        raise AssertionError("no prediction was requested")

    def plan_solved(self, command: SolvePlan, plan: ResourcePlan) -> None:
        self.plan.set_result(plan)

    def service_failed(self, error: BaseException) -> None:
        self.plan.set_exception(error)


def command(seconds: float, begun: Path) -> SolvePlan:
    problem: Any = Slow(seconds, str(begun))
    return SolvePlan(plan=1, problem=problem)


async def begins(begun: Path) -> None:
    for _ in range(6000):
        if begun.exists():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the search never began")


def test_a_search_goes_on_through_ctrl_c(tmp_path):
    async def main() -> ResourcePlan:
        before = descendants()
        solver = ProcessSolver()
        try:
            answer = Answer()
            solver.solve(command(0.5, tmp_path / "begun"), answer)
            await begins(tmp_path / "begun")
            for process in descendants():
                if process not in before:
                    os.kill(process, signal.SIGINT)
            return await answer.plan
        finally:
            solver.close()

    assert asyncio.run(main()) == ResourcePlan(engines=())


def test_a_search_ends_with_heddle_however_it_ends(tmp_path):
    begun = tmp_path / "begun"
    script = f"""
import asyncio
from pathlib import Path
from heddle.executor import Executor, InProcess, Processes, Report, WorkerError
from heddle.engine_stack import ProcessSolver
from tests.app.test_executor import Answer, command
if __name__ == "__main__":
    async def main():
        answer = Answer()
        solver = ProcessSolver()
        solver.solve(command(1000.0, Path({str(begun)!r})), answer)
        await answer.plan
    asyncio.run(main())
"""
    (tmp_path / "main.py").write_text(script)
    heddle = subprocess.Popen(
        [sys.executable, str(tmp_path / "main.py")],
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        asyncio.run(begins(begun))
        children = descendants(heddle.pid)
        assert children
        heddle.kill()
        heddle.wait()
        assert wait_until_gone(children) == []
    finally:
        heddle.kill()
        heddle.wait()
