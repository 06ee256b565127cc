"""The simulated world: carries commands out in simulated time and reports what happened as events.

Only this side of the fence knows the future (the scripts) and the true latency tables. It takes a
callable, not a policy, and gives each command its one terminal event.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import assert_never

import simpy
from simpy.core import EmptySchedule

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
)
from heddle_core.ids import EngineId, GroupId, RolloutId, TrajectoryId
from heddle_core.journal import Handle
from heddle_sim.cluster import Cluster, World, after
from heddle_sim.engine import StepResult
from heddle_sim.tools import ToolPool
from heddle_trace.schema import TrajectoryScript

ROLLOUT = RolloutId("rollout")
"""The one rollout of a run."""


class StuckError(RuntimeError):
    """Nothing can happen any more, yet trajectories are unfinished."""


class _Live:
    """Where the environment stands with one trajectory."""

    __slots__ = ("done", "group", "id", "index", "made", "rewritten", "script", "started")

    def __init__(self, script: TrajectoryScript) -> None:
        self.id = TrajectoryId(script.id)
        self.group = GroupId(script.group)
        self.script = script
        self.index = 0
        """The step that runs or will run next."""
        self.made = 0
        """Tokens of that step made in dispatches that did not finish it."""
        self.started = False
        """Whether that step was dispatched before: then all of its prompt is its own context."""
        self.rewritten = False
        """Whether the agent compacted its history since the last dispatch."""
        self.done = False


class SimDriver:
    """Runs one rollout of `scripts` against `handle` in simulated time."""

    def __init__(
        self,
        scripts: Sequence[TrajectoryScript],
        handle: Handle,
        world: World,
        deadline: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.env = simpy.Environment()
        self.handle, self.world, self.deadline = handle, world, deadline
        self._live = {TrajectoryId(s.id): _Live(s) for s in scripts}
        self._unfinished = len(self._live)
        self._events: deque[Event] = deque()
        self._delivering = False
        self._tick_at: float | None = None
        self._tools = ToolPool(self.env, world.tool_capacity)
        self._cluster = Cluster(
            self.env,
            world,
            deliver=self._deliver,
            on_end=self._step_ended,
            on_salvage=self._salvage,
        )

    def run(self) -> None:
        """Deliver every event until all trajectories are finished.

        Raises `StuckError` when nothing is left to happen before that.
        """
        arrivals = sorted(self._live.values(), key=lambda live: live.script.arrival_s)
        for live in arrivals:
            delay_s = live.script.arrival_s - arrivals[0].script.arrival_s
            after(self.env, delay_s, partial(self._arrive, live))
        self._deliver(RolloutStarted(time_s=0.0, rollout=ROLLOUT, trajectories=self._unfinished))
        try:
            while self._unfinished:
                self.env.step()
        except EmptySchedule:
            raise StuckError(
                f"{self._unfinished} trajectories cannot go on at {self.env.now:.1f} s: "
                f"{len(self._cluster.engines)} engines are alive and nothing is running"
            ) from None

    # -- events in, commands out -----------------------------------------------------------------

    def _deliver(self, event: Event) -> None:
        """Hand an event over, then carry the answer out; events born meanwhile wait their turn."""
        self._events.append(event)
        if self._delivering:
            return
        self._delivering = True
        events = self._events
        while events:
            for command in self.handle(events.popleft()):
                self._carry_out(command)
        self._delivering = False
        deadline = self.deadline()
        if deadline is not None and deadline != self._tick_at:
            self._tick_at = deadline
            after(self.env, max(0.0, deadline - self.env.now), self._tick)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Dispatch():
                self._dispatch(command)
            case Preempt():
                self._cluster.preempt(command)
            case Migrate():
                self._cluster.migrate(command, self._group(command.trajectory))
            case Predict():
                after(self.env, self.world.prediction_s, lambda: self._predicted(command))
            case SolvePlan():
                given_s = self.world.planning_s
                seconds = command.problem.charged_s if given_s is None else given_s
                after(self.env, seconds, lambda: self._solved(command))
            case StartEngine():
                self._cluster.start(command)
            case StopEngine():
                self._cluster.stop(command)
            case Cancel():
                self._finish(self._live[command.trajectory], "cancelled")
            case _:
                assert_never(command)

    def _tick(self) -> None:
        if self._tick_at is not None and self.env.now >= self._tick_at:
            self._tick_at = None
            self._deliver(Tick(time_s=self.env.now))

    # -- the environment's side of a trajectory ----------------------------------------------------

    def _arrive(self, live: _Live) -> None:
        script = live.script
        self._deliver(
            TrajectoryArrived(
                time_s=self.env.now,
                rollout=ROLLOUT,
                trajectory=live.id,
                group=live.group,
                task=script.task,
                prompt_tokens=script.steps[0].prompt_tokens,
            )
        )

    def _dispatch(self, command: Dispatch) -> None:
        live = self._live[command.trajectory]
        step = live.script.steps[command.step]
        prompt_tokens = step.prompt_tokens + live.made
        self._cluster.dispatch(
            command,
            live.group,
            prompt_tokens=prompt_tokens,
            shared_tokens=prompt_tokens if live.started else step.shared_tokens,
            output_tokens=step.output_tokens - live.made,
        )
        live.started = True
        if live.rewritten:
            live.rewritten = False
            self._cluster.forget(command.trajectory, but=command.engine)

    def _step_ended(self, name: EngineId, result: StepResult) -> None:
        live = self._live[result.trajectory]
        if not result.finished:
            live.made += result.tokens
            self._deliver(
                StepPreempted(
                    time_s=self.env.now,
                    trajectory=result.trajectory,
                    step=live.index,
                    engine=name,
                    output_tokens=result.tokens,
                    queued_s=result.queued_s,
                    prefill_s=result.prefill_s,
                    decode_s=result.decode_s,
                    cached_tokens=result.cached_tokens,
                    recomputes=result.recomputes,
                )
            )
        else:
            script = live.script
            last = live.index == len(script.steps) - 1
            ending: StopReason = "length_limit" if script.truncated else "answer"
            self._deliver(
                StepFinished(
                    time_s=self.env.now,
                    trajectory=result.trajectory,
                    step=live.index,
                    engine=name,
                    output_tokens=result.tokens,
                    reason=ending if last else "tool_call",
                    queued_s=result.queued_s,
                    prefill_s=result.prefill_s,
                    decode_s=result.decode_s,
                    cached_tokens=result.cached_tokens,
                    recomputes=result.recomputes,
                )
            )
            self._to_environment(live, last=last)

    def _salvage(self, trajectory: TrajectoryId, tokens: int) -> None:
        self._live[trajectory].made += tokens

    def _to_environment(self, live: _Live, *, last: bool) -> None:
        """Run the tool that the step ended in, then go on or close the trajectory."""
        step = live.script.steps[live.index]
        if last and step.tool is None:
            self._finish(live, "truncated" if live.script.truncated else "completed")
            return
        self._deliver(
            ToolStarted(
                time_s=self.env.now,
                trajectory=live.id,
                step=live.index,
                tool=step.tool or "",
            )
        )
        self._tools.run(step.tool_s, partial(self._tool_returned, live))

    def _tool_returned(self, live: _Live) -> None:
        if live.done:
            return
        steps = live.script.steps
        step = steps[live.index]
        live.index += 1
        if live.index == len(steps):
            self._finish(live, "truncated" if live.script.truncated else "completed")
            return
        following = steps[live.index]
        self._cluster.tool_returned(live.id)
        live.made = 0
        live.started = False
        live.rewritten = following.shared_tokens < step.prompt_tokens + step.output_tokens
        self._deliver(
            ToolReturned(
                time_s=self.env.now,
                trajectory=live.id,
                step=live.index - 1,
                tool=step.tool or "",
                ok=step.tool_ok,
                observation_tokens=step.tool_tokens,
                context_tokens=following.prompt_tokens,
            )
        )

    def _finish(self, live: _Live, outcome: Outcome) -> None:
        live.done = True
        self._unfinished -= 1
        self._deliver(TrajectoryFinished(time_s=self.env.now, trajectory=live.id, outcome=outcome))

    def _group(self, trajectory: TrajectoryId) -> GroupId:
        return self._live[trajectory].group

    # -- services ---------------------------------------------------------------------------------

    def _predicted(self, command: Predict) -> None:
        self._deliver(
            Predicted(
                time_s=self.env.now,
                trajectory=command.trajectory,
                step=command.step,
                remaining_tokens=command.estimate,
            )
        )

    def _solved(self, command: SolvePlan) -> None:
        plan = command.problem.solve()
        self._deliver(PlanSolved(time_s=self.env.now, plan=command.plan, resource_plan=plan))
