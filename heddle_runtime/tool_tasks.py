"""Tool calls that are coroutines, as tasks of the event loop."""

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

from heddle_core.ids import TrajectoryId
from heddle_rollout.agents import ToolAnswer, ToolListener


class ToolTasks:
    """The running calls of agents; each agent has one at most."""

    def __init__(self) -> None:
        self._running: dict[TrajectoryId, asyncio.Task[ToolAnswer]] = {}
        self._ending: dict[asyncio.Task[ToolAnswer], None] = {}
        """Cancelled ones that clean up."""

    def begin(
        self,
        trajectory: TrajectoryId,
        call: Coroutine[Any, Any, ToolAnswer],
        listener: ToolListener,
    ) -> None:
        """Run a call; the listener receives its result or its error."""
        task = asyncio.get_running_loop().create_task(call)
        self._running[trajectory] = task
        task.add_done_callback(partial(self._ended, trajectory, listener))

    def cancel(self, trajectory: TrajectoryId) -> None:
        """Cancel an agent's call; its listener receives no result any more."""
        task = self._running.pop(trajectory, None)
        if task is not None:
            self._ending[task] = None
            task.cancel()

    async def close(self) -> None:
        """Cancel all calls and wait until they have cleaned up."""
        for trajectory in list(self._running):
            self.cancel(trajectory)
        if self._ending:
            await asyncio.wait(list(self._ending))

    def _ended(
        self, trajectory: TrajectoryId, listener: ToolListener, task: asyncio.Task[ToolAnswer]
    ) -> None:
        if self._ending.pop(task, 0) is None:
            if not task.cancelled():
                task.exception()  # of a call that was cancelled: of no interest
            return
        del self._running[trajectory]
        if task.cancelled():
            listener.tool_failed(trajectory, asyncio.CancelledError("a tool call was cancelled"))
        elif (error := task.exception()) is not None:
            listener.tool_failed(trajectory, error)
        else:
            listener.tool_returned(trajectory, task.result())
