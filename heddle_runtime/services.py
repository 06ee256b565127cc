"""Services of a rollout on an event loop: plans that are searched for in another process."""

import asyncio
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context, parent_process

from heddle_core.commands import SolvePlan
from heddle_core.plans import PlanProblem, ResourcePlan
from heddle_rollout.services import ServiceListener


class WorkerSolver:
    """Searches in another process, so that the event loop goes on; implements `Solver`."""

    def __init__(self) -> None:
        # Spawned, not forked: a copy of a process whose libraries run threads may hang.
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_tie)

    def solve(self, command: SolvePlan, listener: ServiceListener) -> None:
        """Search for a plan."""
        loop = asyncio.get_running_loop()
        search = loop.run_in_executor(self._pool, _solve, command.problem)
        search.add_done_callback(partial(_report, command, listener))

    def close(self) -> None:
        """End the other process."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _report(
    command: SolvePlan, listener: ServiceListener, search: asyncio.Future[ResourcePlan]
) -> None:
    if search.cancelled():
        return
    error = search.exception()
    if error is not None:
        listener.service_failed(error)
    else:
        listener.plan_solved(command, search.result())


def _tie() -> None:
    """Leave Ctrl-C, which reaches every process of a terminal, to Heddle; and end when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_heddle, daemon=True).start()


def _end_with_heddle() -> None:
    heddle = parent_process()
    if heddle is not None:
        heddle.join()
        os._exit(1)


def _solve(problem: PlanProblem) -> ResourcePlan:
    return problem.solve()
