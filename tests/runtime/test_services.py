"""Searches in another process: Ctrl-C does not reach them, and they end with Heddle."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

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
            search = asyncio.create_task(solver(command(0.5, tmp_path / "begun")))
            await begins(tmp_path / "begun")
            for process in descendants():
                if process not in before:
                    os.kill(process, signal.SIGINT)
            return await search
        finally:
            solver.close()

    assert asyncio.run(main()) == ResourcePlan(engines=())


def test_a_search_ends_with_heddle_however_it_ends(tmp_path):
    begun = tmp_path / "begun"
    script = f"""
import asyncio
from pathlib import Path
from heddle_runtime.services import WorkerSolver
from tests.runtime.test_services import command
if __name__ == "__main__":
    asyncio.run(WorkerSolver()(command(1000.0, Path({str(begun)!r}))))
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
