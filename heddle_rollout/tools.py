"""Tool calls of a run: at most `capacity` at once, none longer than its limit."""

from collections import deque

from heddle_core.ids import TrajectoryId
from heddle_rollout.agents import Agent, ToolAnswer, ToolListener
from heddle_rollout.clock import Clock


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
    ) -> None:
        """`capacity` None: any number runs at once. `limit_s` None: a call may take for ever.

        Raises:
            ValueError: a capacity below 1.
        """
        if capacity is not None and capacity < 1:
            raise ValueError(f"tool capacity must be 1 or more, or none for no limit: {capacity}")
        self.queued_s = 0.0
        """Seconds that calls waited before they began, in all."""
        self._clock, self._listener = clock, listener
        self._capacity, self._limit_s = capacity, limit_s
        self.active: dict[TrajectoryId, tuple[Agent, int]] = {}
        """Calls that run now, each with its number: a timer may be of an earlier one."""
        self._waiting: deque[tuple[float, Agent]] = deque()
        self._calls = 0

    @property
    def running(self) -> int:
        """Calls that run now."""
        return len(self.active)

    @property
    def waiting(self) -> int:
        """Calls that have not begun."""
        return len(self._waiting)

    def call(self, agent: Agent) -> None:
        """Begin an agent's call once `capacity` allows; the listener is called at its end."""
        if self._capacity is not None and len(self.active) >= self._capacity:
            self._waiting.append((self._clock.now_s, agent))
        else:
            self._begin(agent)

    def cancel(self, trajectory: TrajectoryId) -> None:
        """Cancel the call of a trajectory, if it has one; it reports no result."""
        agent, _ = self.active.pop(trajectory, (None, 0))
        if agent is not None:
            agent.cancel_tool()
            self._begin_next()
            return
        for waiting in self._waiting:
            if waiting[1].id == trajectory:
                self._waiting.remove(waiting)
                return

    def close(self) -> None:
        """Cancel every call; none reports a result any more."""
        self._waiting.clear()
        for agent, _ in self.active.values():
            agent.cancel_tool()
        self.active.clear()

    def tool_returned(self, trajectory: TrajectoryId, answer: ToolAnswer) -> None:
        """See `ToolListener`."""
        del self.active[trajectory]
        # The call that has waited longest begins before the listener can request another.
        self._begin_next()
        self._listener.tool_returned(trajectory, answer)

    def tool_failed(self, trajectory: TrajectoryId, error: BaseException) -> None:
        """See `ToolListener`."""
        del self.active[trajectory]
        self._listener.tool_failed(trajectory, error)

    def _begin_next(self) -> None:
        if self._waiting:
            since_s, agent = self._waiting.popleft()
            self.queued_s += self._clock.now_s - since_s
            self._begin(agent)

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
