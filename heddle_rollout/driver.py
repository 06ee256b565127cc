"""The real world: carries commands out on engines and tools, and reports what happened as events.

The simulator's driver with an event loop in place of simulated time. It takes a callable, not a
policy, gives each command its one terminal event, and knows engines and agents only by their faces.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, assert_never

from heddle_core.commands import (
    Cancel,
    Command,
    Dispatch,
    Migrate,
    Predict,
    Preempt,
    SolvePlan,
    StartEngine,
    StopEngine,
)
from heddle_core.events import (
    Event,
    Outcome,
    PlanSolved,
    Predicted,
    RolloutStarted,
    StepFinished,
    StepPreempted,
    StopReason,
    Tick,
    ToolReturned,
    ToolStarted,
    TrajectoryArrived,
    TrajectoryFinished,
    WeightsUpdated,
)
from heddle_core.ids import EngineId, RolloutId
from heddle_core.journal import Handle
from heddle_runtime.agent import Agent, StepVerdict, answer_within
from heddle_runtime.clock import RunClock
from heddle_runtime.cluster import Cluster
from heddle_runtime.engine import Launcher, StepEnd
from heddle_runtime.services import Predictions, Solver, charged_solver, own_estimates

DRAIN_S = 5.0
"""How long an interrupted run waits for the engines to hand over the tokens of running steps."""


ROLLOUT = RolloutId("rollout")
"""The one rollout of a run."""


class StuckError(RuntimeError):
    """Nothing can happen any more, yet trajectories are unfinished."""


class _Live:
    """Where the driver stands with one trajectory."""

    __slots__ = ("agent", "arrived", "done", "step", "tool")

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.arrived = False
        self.step = 0
        self.tool: asyncio.Task[None] | None = None
        self.done = False


class AsyncDriver:
    """Runs one rollout of `agents` against `handle` on the engines that `launcher` starts."""

    def __init__(
        self,
        agents: Sequence[Agent],
        handle: Handle,
        launcher: Launcher,
        clock: RunClock,
        *,
        deadline: Callable[[], float | None] = lambda: None,
        tool_capacity: int | None = None,
        tool_limit_s: float | None = None,
        predictions: Predictions | None = None,
        prediction_s: float = 0.0,
        solver: Solver | None = None,
        report_interval_s: float = 5.0,
        report_delay_s: float = 0.05,
    ) -> None:
        """Tool calls beyond `tool_capacity` wait in order; those over `tool_limit_s` are cut.

        Without a prediction service the core's own estimate comes back after `prediction_s`;
        without a solver a plan is searched for here, and its charged time waited for.
        """
        self.handle, self.deadline = handle, deadline
        self._clock = clock
        self._agents = [_Live(agent) for agent in agents]
        self._live = {live.agent.id: live for live in self._agents}
        self._unfinished = len(self._live)
        self._events: deque[Event] = deque()
        self._delivering = False
        self._tick_at: float | None = None
        self._to_arrive = len(self._live)
        self._places = nullcontext() if tool_capacity is None else asyncio.Semaphore(tool_capacity)
        self._tool_limit_s = tool_limit_s
        self._predictions = predictions or own_estimates(clock, prediction_s)
        self._solver = solver or charged_solver(clock)
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._interrupted = False
        self._cluster = Cluster(
            clock,
            launcher,
            deliver=self._deliver,
            on_end=self._step_ended,
            on_salvage=self._keep,
            report_interval_s=report_interval_s,
            report_delay_s=report_delay_s,
        )

    async def run(self) -> None:
        """Deliver every event until all trajectories are finished.

        Engines are left as they are; the launcher ends them.

        Raises:
            StuckError: nothing is left to happen before that.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        self._clock.thaw()
        self._deliver(
            RolloutStarted(time_s=self._clock.now_s, rollout=ROLLOUT, trajectories=self._unfinished)
        )
        for live in sorted(self._agents, key=lambda live: live.agent.arrival_s):
            self._clock.call_after(live.agent.arrival_s, partial(self._arrive, live))
        self._look_whether_over()
        try:
            await self._over
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            loop.set_exception_handler(None)

    async def interrupt(self) -> None:
        """Wind up early: running steps hand over their tokens, every trajectory is cancelled."""
        self._interrupted = True
        try:
            self._cluster.abort_all()
            until_s = asyncio.get_running_loop().time() + DRAIN_S
            while self._cluster.computes and asyncio.get_running_loop().time() < until_s:
                await asyncio.sleep(0.02)
        finally:
            for live in self._agents:
                if live.tool is not None:
                    live.tool.cancel()
                if live.arrived:
                    self._finish(live, "cancelled")
            if not self._over.done():
                self._over.set_result(None)

    def update_weights(self, version: int, path: str) -> None:
        """Push other weights to every engine; steps under way go on under them."""
        self._cluster.update_weights(version, path)
        self._deliver(WeightsUpdated(time_s=self._clock.now_s, version=version))

    # -- events in, commands out -----------------------------------------------------------------

    def _deliver(self, event: Event) -> None:
        """Hand an event over, then carry the answer out; events born meanwhile wait their turn."""
        if self._over.done():
            return  # the run has ended, or failed: what comes now is nobody's business
        self._events.append(event)
        if self._delivering:
            return
        self._delivering = True
        try:
            while self._events:
                for command in self.handle(self._events.popleft()):
                    self._carry_out(command)
        except BaseException as error:
            # Raised into a loop's callback it would only be logged: it ends the run instead.
            self._fail(error)
            return
        finally:
            self._delivering = False
        deadline = self.deadline()
        if deadline is not None and deadline != self._tick_at:
            self._tick_at = deadline
            self._clock.call_at(deadline, self._tick)
        # Not at once: who told this event may have more to do, such as to call a tool.
        asyncio.get_running_loop().call_soon(self._look_whether_over)

    def _carry_out(self, command: Command) -> None:
        if self._interrupted and not isinstance(command, Cancel):
            return  # every trajectory is about to be cancelled, which ends the command
        match command:
            case Dispatch():
                self._dispatch(command)
            case Preempt():
                self._cluster.preempt(command)
            case Migrate():
                agent = self._live[command.trajectory].agent
                self._cluster.migrate(command, agent.group, agent.context_ids)
            case Predict():
                self._go(self._predict(command))
            case SolvePlan():
                self._go(self._solve(command))
            case StartEngine():
                self._cluster.start(command)
            case StopEngine():
                self._cluster.stop(command)
            case Cancel():
                self._finish(self._live[command.trajectory], "cancelled")
            case _:
                assert_never(command)

    def _tick(self) -> None:
        if self._tick_at is not None and self._clock.now_s >= self._tick_at:
            self._tick_at = None
            self._deliver(Tick(time_s=self._clock.now_s))

    def _look_whether_over(self) -> None:
        if self._over.done() or self._interrupted:
            return
        if not self._unfinished:
            self._over.set_result(None)
        elif not (
            self._to_arrive or self._tasks or self._cluster.busy or self._tick_at is not None
        ):
            failure = self._cluster.last_failure
            self._fail(
                StuckError(
                    f"{self._unfinished} trajectories cannot go on at {self._clock.now_s:.1f} s: "
                    f"{len(self._cluster.engines)} engines are alive and nothing is running"
                    + (f"; the last to fail was {failure}" if failure else "")
                )
            )

    def _fail(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A failed callback, which asyncio would only log, means that something never happens."""
        loop.default_exception_handler(context)
        if "handle" in context:
            self._fail(context["exception"])

    def _go(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._gone)
        return task

    def _gone(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)
        self._look_whether_over()

    # -- the environment's side of a trajectory ----------------------------------------------------

    def _arrive(self, live: _Live) -> None:
        if self._interrupted:
            return
        self._to_arrive -= 1
        live.arrived = True
        agent = live.agent
        arrived = TrajectoryArrived(
            time_s=self._clock.now_s,
            rollout=ROLLOUT,
            trajectory=agent.id,
            group=agent.group,
            task=agent.task,
            prompt_tokens=agent.prompt_tokens,
        )
        self._deliver(arrived)

    def _dispatch(self, command: Dispatch) -> None:
        request = self._live[command.trajectory].agent.request()
        refused = self._cluster.dispatch(command, request)
        if refused:
            end = StepEnd(command.trajectory, 0, True, 0.0, 0.0, 0.0, 0, 0, error=refused)
            self._step_ended(command.engine, end)

    def _keep(self, end: StepEnd) -> StepVerdict | None:
        """Hand an agent its tokens, and ask it about a step that has finished without an error.

        An engine calls this: an agent's defect is not the engine's, and ends the run.
        """
        agent = self._live[end.trajectory].agent
        try:
            agent.take(end)
            return agent.verdict() if end.finished and not end.error else None
        except Exception as error:
            self._fail(error)
            return None

    def _step_ended(self, name: EngineId, end: StepEnd) -> None:
        live = self._live[end.trajectory]
        verdict = self._keep(end)
        if self._over.done():
            return
        if not end.finished:
            self._deliver(
                StepPreempted(
                    time_s=self._clock.now_s,
                    trajectory=end.trajectory,
                    step=live.step,
                    engine=name,
                    output_tokens=end.tokens,
                    queued_s=end.queued_s,
                    prefill_s=end.prefill_s,
                    decode_s=end.decode_s,
                    cached_tokens=end.cached_tokens,
                    recomputes=end.recomputes,
                )
            )
            return
        reason: StopReason = verdict.reason if verdict is not None else "error"
        self._deliver(
            StepFinished(
                time_s=self._clock.now_s,
                trajectory=end.trajectory,
                step=live.step,
                engine=name,
                output_tokens=end.tokens,
                reason=reason,
                queued_s=end.queued_s,
                prefill_s=end.prefill_s,
                decode_s=end.decode_s,
                cached_tokens=end.cached_tokens,
                recomputes=end.recomputes,
            )
        )
        if verdict is None:
            self._finish(live, "failed")
        elif verdict.tool is None:
            self._finish(live, verdict.outcome)
        else:
            started = ToolStarted(
                time_s=self._clock.now_s,
                trajectory=end.trajectory,
                step=live.step,
                tool=verdict.tool,
            )
            self._deliver(started)
            live.tool = self._go(self._use_tool(live, verdict.tool))

    async def _use_tool(self, live: _Live, tool: str) -> None:
        async with self._places:
            answer = await answer_within(self._tool_limit_s, live.agent, self._clock)
        live.tool = None
        if live.done:
            return
        if answer.outcome is not None:
            self._finish(live, answer.outcome)
            return
        self._cluster.moves.tool_returned(live.agent.id)
        live.step += 1
        self._deliver(
            ToolReturned(
                time_s=self._clock.now_s,
                trajectory=live.agent.id,
                step=live.step - 1,
                tool=tool,
                ok=answer.ok,
                observation_tokens=answer.observation_tokens,
                context_tokens=answer.context_tokens,
            )
        )

    def _finish(self, live: _Live, outcome: Outcome) -> None:
        if live.done:
            return
        live.done = True
        self._unfinished -= 1
        now_s, trajectory = self._clock.now_s, live.agent.id
        self._deliver(TrajectoryFinished(time_s=now_s, trajectory=trajectory, outcome=outcome))

    # -- services ---------------------------------------------------------------------------------

    async def _predict(self, command: Predict) -> None:
        try:
            remaining_tokens = await self._predictions(command)
        except (OSError, ValueError, RuntimeError):
            remaining_tokens = None  # the last estimate holds, and the journal shows it
        self._deliver(
            Predicted(
                time_s=self._clock.now_s,
                trajectory=command.trajectory,
                step=command.step,
                remaining_tokens=remaining_tokens,
            )
        )

    async def _solve(self, command: SolvePlan) -> None:
        plan = await self._solver(command)
        self._deliver(PlanSolved(time_s=self._clock.now_s, plan=command.plan, resource_plan=plan))
