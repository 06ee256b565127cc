"""Tool calls of a run: at most `capacity` at once, none longer than its limit."""

from collections import deque
from collections.abc import Mapping, Sequence

from heddle_core.ids import TrajectoryId
from heddle_rollout.agents import Agent, ToolAnswer, ToolListener
from heddle_rollout.clock import Clock
from heddle_rollout.services import CallPool


class ToolPools:
    """Pools by tool, and the one of all other tools."""

    def __init__(self, by_tool: Mapping[str, CallPool], others: CallPool) -> None:
        self._by_tool, self._others = by_tool, others
        self._found: dict[str, tuple[CallPool, ...]] = {}

    def of(self, tool: str) -> Sequence[CallPool]:
        """Pools in which a call takes a place: parallel tools, "a+b", take one in each of theirs.

        Every call takes its places in the same order, so that none waits for another for ever.
        """
        found = self._found.get(tool)
        if found is None:
            parts = (tool,) if tool in self._by_tool else tuple(tool.split("+"))
            named = [pool for name, pool in self._by_tool.items() if name in parts]
            unnamed = any(part not in self._by_tool for part in parts)
            found = self._found[tool] = (*named, *([self._others] if unnamed else []))
        return found


class ToolPool:
    """Starts the calls of agents; with a finite `capacity` the rest wait in order of arrival.

    The call of a cancelled trajectory counts against `capacity` until it has ended.
    """

    def __init__(
        self,
        clock: Clock,
        listener: ToolListener,
        *,
        capacity: int | None = None,
        limit_s: float | None = None,
        pools: ToolPools | None = None,
    ) -> None:
        """`capacity` None: any number runs at once. `limit_s` None: a call may take for ever.

        With `pools`, these have the places instead of `capacity`.

        Raises:
            ValueError: a capacity below 1.
        """
        if capacity is not None and capacity < 1:
            raise ValueError(f"tool capacity must be 1 or more, or none for no limit: {capacity}")
        self._clock, self._listener = clock, listener
        self._capacity, self._limit_s = capacity, limit_s
        self.active: dict[TrajectoryId, tuple[Agent, int]] = {}
        """Calls that run now, each with its number: a timer may be of an earlier one."""
        self._waiting: deque[Agent] = deque()
        self._calls = 0
        self._pools = pools
        self._held: dict[TrajectoryId, Sequence[CallPool]] = {}
        """Pools of each call that has a place in one, or waits for it."""

    @property
    def running(self) -> int:
        """Calls that run now."""
        return len(self.active)

    @property
    def waiting(self) -> int:
        """Calls that have not begun."""
        return len(self._waiting)

    def call(self, agent: Agent, tool: str = "", number: int = 0) -> None:
        """Begin an agent's call once there is a place for it; the listener is called at its end.

        `number` counts the calls of the agent.
        """
        if self._pools is not None:
            pools = self._held[agent.id] = self._pools.of(tool)
            self._acquire(agent, pools, 0, number, 0.0)
        elif self._capacity is not None and len(self.active) >= self._capacity:
            self._waiting.append(agent)
        else:
            self._begin(agent)

    def cancel(self, trajectory: TrajectoryId) -> None:
        """Cancel the call of a trajectory, if it has one; it reports no result."""
        agent, _ = self.active.pop(trajectory, (None, 0))
        if agent is not None:
            agent.cancel_tool()
            self._begin_next(trajectory)
            return
        if self._pools is not None:
            self._begin_next(trajectory)
            return
        for waiting in self._waiting:
            if waiting.id == trajectory:
                self._waiting.remove(waiting)
                return

    def close(self) -> None:
        """Cancel every call; none reports a result any more."""
        self._waiting.clear()
        self._held.clear()
        for agent, _ in self.active.values():
            agent.cancel_tool()
        self.active.clear()

    def tool_returned(self, trajectory: TrajectoryId, answer: ToolAnswer) -> None:
        del self.active[trajectory]
        if self._waiting or self._held:
            # The call that has waited longest begins before the listener can request another.
            self._begin_next(trajectory)
        self._listener.tool_returned(trajectory, answer)

    def tool_failed(self, trajectory: TrajectoryId, error: BaseException) -> None:
        del self.active[trajectory]
        self._listener.tool_failed(trajectory, error)

    def _begin_next(self, ended: TrajectoryId) -> None:
        if self._pools is not None:
            for pool in self._held.pop(ended, ()):
                pool.release(ended)
        elif self._waiting:
            self._begin(self._waiting.popleft())

    def _acquire(
        self, agent: Agent, pools: Sequence[CallPool], taken: int, number: int, delay_s: float
    ) -> None:
        """Take the places that a call needs, then begin it after the longest of their delays."""
        if taken < len(pools):
            pools[taken].acquire(
                agent.id,
                number,
                lambda s: self._acquire(agent, pools, taken + 1, number, max(delay_s, s)),
            )
        elif delay_s:
            self._calls += 1
            self.active[agent.id] = agent, self._calls
            self._clock.call_after(delay_s, self._begin_late, agent, self._calls)
        else:
            self._begin(agent)

    def _begin_late(self, agent: Agent, call: int) -> None:
        if self.active.get(agent.id) == (agent, call):
            try:
                self._begin(agent)
            except Exception as error:
                self.tool_failed(agent.id, error)

    def _begin(self, agent: Agent) -> None:
        self._calls += 1
        self.active[agent.id] = agent, self._calls
        if self._limit_s is not None:
            self._clock.call_after(self._limit_s, self._cut, agent, self._calls, self._limit_s)
        agent.call_tool(self)

    def _cut(self, agent: Agent, call: int, limit_s: float) -> None:
        if self.active.get(agent.id) == (agent, call):
            agent.cancel_tool()
            self.tool_returned(agent.id, agent.on_tool_timeout(limit_s))
