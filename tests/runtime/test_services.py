"""Searches in another process: Ctrl-C does not reach them, and they end with Heddle."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from heddle_core.commands import SolvePlan
from heddle_core.plans import ResourcePlan
from heddle_runtime.services import WorkerSolver
from tests.runtime.processes import descendants, wait_until_gone

ROOT = Path(__file__).resolve().parents[2]


class Slow(NamedTuple):
    """A problem whose search takes a while, and says when it has begun."""

    seconds: float
    begun: str
    charged_s: float = 0.0

    def solve(self) -> ResourcePlan:
        Path(self.begun).write_text("")
        time.sleep(self.seconds)
        return ResourcePlan(engines=())


class Answer:
    """Takes the answer of a solver; made inside a running event loop."""

    def __init__(self) -> None:
        self.plan: asyncio.Future[ResourcePlan] = asyncio.get_running_loop().create_future()

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
        solver = WorkerSolver()
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
from heddle_runtime.services import WorkerSolver
from tests.runtime.test_services import Answer, command
async def main():
    answer = Answer()
    WorkerSolver().solve(command(1000.0, Path({str(begun)!r})), answer)
    await answer.plan
if __name__ == "__main__":
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


class Unsolvable(NamedTuple):
    charged_s: float = 0.0

    def solve(self) -> ResourcePlan:
        raise ZeroDivisionError("no plan")


def test_a_defect_in_a_search_is_the_answer():
    async def main() -> None:
        solver = WorkerSolver()
        try:
            answer = Answer()
            problem: Any = Unsolvable()
            solver.solve(SolvePlan(plan=1, problem=problem), answer)
            with pytest.raises(ZeroDivisionError, match="no plan"):
                await answer.plan
        finally:
            solver.close()

    asyncio.run(main())
