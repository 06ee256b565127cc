"""Drives the core, simulated or real: delivers events and executes the core's commands.

The driver has no loop of its own and reads only the clock that it is given. Engines, agents and
services call it; it delivers an event, executes the commands that come back, and returns. Each
command ends in exactly one event.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from mypy_extensions import mypyc_attr

from heddle_core.commands import (
    Cancel,
    Dispatch,
    Migrate,
    Predict,
    Preempt,
    SolvePlan,
    StartEngine,
    StopEngine,
)
from heddle_core.defaults import REPORT_DELAY_S, REPORT_INTERVAL_S
from heddle_core.events import (
    EngineJoined,
    EngineRecalled,
    Event,
    MigrationFinished,
    Outcome,
    PlanSolved,
    Predicted,
    RolloutClosed,
    RolloutStarted,
    StepFinished,
    StepPreempted,
    Tick,
    ToolReturned,
    ToolStarted,
    TrajectoryArrived,
    TrajectoryFinished,
    WeightsUpdated,
)
from heddle_core.ids import EngineId, RolloutId, TrajectoryId
from heddle_core.plans import EngineSpec, ResourcePlan
from heddle_rollout.agents import Agent, NextAction, ToolAnswer
from heddle_rollout.clock import Clock
from heddle_rollout.cluster import Cluster
from heddle_rollout.core import Core
from heddle_rollout.engines import Launcher, StepResult
from heddle_rollout.services import ChargedSolver, CoreEstimates, Predictions, Solver
from heddle_rollout.tools import ToolPool, ToolPools

ROLLOUT = RolloutId("rollout")
"""The rollout of a run that has only one."""


@mypyc_attr(native_class=False)
class StuckError(RuntimeError):
    """Nothing can happen any more, yet trajectories are unfinished."""


@mypyc_attr(native_class=False)
class RolloutError(ValueError):
    """A rollout or an agent that cannot be admitted; the message names it."""


class _Rollout:
    """A rollout that is not over."""

    __slots__ = ("admitted", "expected", "id", "opened_s", "unfinished")

    def __init__(self, id_: RolloutId, expected: int | None, opened_s: float) -> None:
        self.id, self.expected, self.opened_s = id_, expected, opened_s
        self.admitted = 0
        self.unfinished = 0

    @property
    def complete(self) -> bool:
        """Whether no more agents will be admitted."""
        return self.admitted == self.expected


class _Trajectory:
    """The driver's state of one agent."""

    __slots__ = (
        "agent",
        "arrived",
        "cancelled",
        "id",
        "keeps_kv",
        "limit_tokens",
        "rollout",
        "step",
        "tool",
    )

    def __init__(self, agent: Agent, rollout: _Rollout) -> None:
        self.id, self.agent, self.rollout = agent.id, agent, rollout
        self.arrived = False
        self.cancelled = False
        """Whether it ends as it arrives."""
        self.step = 0
        self.tool = ""
        """Tool of the last call."""
        self.limit_tokens = 0
        """Tokens after which the dispatch under way ends before its step may; 0: none."""
        self.keeps_kv = False
        """Whether its engine keeps its KV then, for another engine."""


class Driver:
    """Runs rollouts of agents under `core`, on the engines that `launcher` starts.

    Implements `ToolListener` and `ServiceListener`.
    """

    def __init__(
        self,
        core: Core,
        launcher: Launcher,
        clock: Clock,
        *,
        predictions: Predictions | None = None,
        solver: Solver | None = None,
        tool_capacity: int | None = None,
        tool_limit_s: float | None = None,
        tool_pools: ToolPools | None = None,
        report_interval_s: float = REPORT_INTERVAL_S,
        report_delay_s: float = REPORT_DELAY_S,
        on_idle: Callable[[], None] = lambda: None,
        on_error: Callable[[BaseException], None] = lambda error: None,
        on_tokens_lost: Callable[[TrajectoryId, int], None] = lambda trajectory, tokens: None,
        handlers: Mapping[type, Callable[[Any], None]] | None = None,
        expects_agents: Callable[[], bool] | None = None,
    ) -> None:
        """Without a prediction service the core's own estimate is returned. Without a solver a plan
        is searched in place, after its charged time.

        Tool calls beyond `tool_capacity` wait in order; those over `tool_limit_s` are cut. With
        `tool_pools`, calls take places in these and `tool_capacity` has no meaning. Samples of
        engines are delivered `report_delay_s` after they were taken; at interval 0 none are.
        `on_idle` is called when the last open rollout is over and no engine is stopping; it may
        open more rollouts.
        `on_error` is called once, for an error after which no event is delivered: `StuckError`, or
        a defect of the core, an agent or a service. `handlers` execute the commands of a core that
        has more than a rollout's, by their class; while `expects_agents` is false, open rollouts
        get no more agents. `on_tokens_lost` gets the tokens of a step of a cancelled trajectory.
        """
        self._core, self._clock = core, clock
        self._predictions = predictions or CoreEstimates(clock)
        self._solver = solver or ChargedSolver(clock)
        self._tools = ToolPool(
            clock, self, capacity=tool_capacity, limit_s=tool_limit_s, pools=tool_pools
        )
        self._report_interval_s, self._report_delay_s = report_interval_s, report_delay_s
        self._on_idle, self._on_error, self._on_tokens_lost = on_idle, on_error, on_tokens_lost
        self._cluster = Cluster(
            clock,
            launcher,
            deliver=self._deliver,
            on_end=self._step_ended,
            on_salvage=self._salvage,
            on_thaw=self._arrive_held,
        )
        self._rollouts: dict[RolloutId, _Rollout] = {}
        self._opened: set[RolloutId] = set()
        """Names of all rollouts so far."""
        self._trajectories: dict[TrajectoryId, _Trajectory] = {}
        """Admitted agents that are not finished."""
        self._unnamed: dict[TrajectoryId, _Trajectory] = {}
        """Those whose tool call begins once it has its name."""
        self._held: list[_Trajectory] = []
        """Agents that would have arrived while the clock was stopped."""
        self._arriving = self._requests = 0
        """Admitted agents that have not arrived; predictions and plans that are due."""
        self._events: deque[Event] = deque()
        self._delivering = False
        self._tick_at: float | None = None
        self._samples = self._check_is_due = False
        """Whether the next sample of engines is due, and the next check."""
        self._idle = True
        self._interrupted = self._closed = False
        self._held_dispatches: list[Dispatch] | None = None
        """That wait for `resume`; None without a pause."""
        self._handlers = self._of_rollouts() | dict(handlers or {})
        self._expects_agents = expects_agents

    def _of_rollouts(self) -> dict[type, Callable[[Any], None]]:
        return {
            Cancel: self.cancel,
            Dispatch: self._dispatch,
            Migrate: self._migrate,
            Predict: self._predict,
            Preempt: self._cluster.preempt,
            SolvePlan: self._solve,
            StartEngine: self._cluster.start,
            StopEngine: self._stop,
        }

    # -- calls of the owner -----------------------------------------------------------------------

    def start(self) -> None:
        """Start the clock. Called once, first."""
        self._sample_later()
        self._clock.thaw()

    @property
    def open_rollouts(self) -> Sequence[RolloutId]:
        """Rollouts that are not over."""
        return tuple(self._rollouts)

    @property
    def accepting_rollouts(self) -> Sequence[RolloutId]:
        """Open rollouts that may have more trajectories."""
        return tuple(name for name, rollout in self._rollouts.items() if not rollout.complete)

    def open_rollout(
        self, rollout: RolloutId, *, trajectories: int | None = None, weights_version: int = 0
    ) -> None:
        """Begin a rollout of so many trajectories; None: open until `close_rollout`.

        Raises:
            RolloutError: it was opened before, it has fewer than no trajectories, or the run has
                ended.
        """
        if rollout in self._rollouts:
            raise RolloutError(f"rollout {rollout} is open already")
        if rollout in self._opened:
            raise RolloutError(f"rollout {rollout} was open before: give it a name of its own")
        if trajectories is not None and trajectories < 0:
            raise RolloutError(f"rollout {rollout} cannot have {trajectories} trajectories")
        if self._closed or self._interrupted:
            raise RolloutError(f"rollout {rollout} cannot be opened: the run has ended")
        self._opened.add(rollout)
        now_s = self._clock.now_s
        state = self._rollouts[rollout] = _Rollout(rollout, trajectories, now_s)
        self._idle = False
        self._deliver(
            RolloutStarted(
                time_s=now_s,
                rollout=rollout,
                trajectories=trajectories,
                weights_version=weights_version,
            )
        )
        self._end_if_over(state)

    def close_rollout(self, rollout: RolloutId) -> None:
        """Announce that no more agents will be admitted; admitted ones go on.

        Raises:
            RolloutError: it is not open.
        """
        state = self._open(rollout)
        state.expected = state.admitted
        self._deliver(
            RolloutClosed(time_s=self._clock.now_s, rollout=rollout, trajectories=state.admitted)
        )
        self._end_if_over(state)

    def admit(self, agent: Agent, rollout: RolloutId = ROLLOUT) -> None:
        """Take an agent into an open rollout, at any time; it arrives at its `arrival_s`.

        Its id is its own in the whole run: late answers and the journal name it by that.

        Raises:
            RolloutError: the rollout is not open or has all its trajectories, the trajectory is
                here already, or the run is interrupted.
        """
        state = self._open(rollout)
        if self._interrupted:
            raise RolloutError(f"trajectory {agent.id} cannot be admitted: the run is interrupted")
        if state.complete:
            raise RolloutError(f"rollout {rollout} has all of its {state.admitted} trajectories")
        if agent.id in self._trajectories:
            raise RolloutError(f"trajectory {agent.id} is here already")
        state.admitted += 1
        state.unfinished += 1
        self._arriving += 1
        self._sample_later()
        tracked = self._trajectories[agent.id] = _Trajectory(agent, state)
        open_for_s = self._clock.now_s - state.opened_s
        self._clock.call_after(max(0.0, agent.arrival_s - open_for_s), self._arrive, tracked)

    def attach(self, spec: EngineSpec) -> None:
        """Take in an engine that no plan has; when it fails, it is not started again."""
        self._cluster.attach(spec)

    def join(self, spec: EngineSpec) -> None:
        """Offer the core an engine that its owner has started, at any time.

        Its name is its own in the whole run. When it fails, it is started again as those of plans.
        """
        self._cluster.go_on()
        self._deliver(
            EngineJoined(
                time_s=self._clock.now_s,
                engine=spec.engine,
                shape=spec.shape,
                max_running=spec.max_running,
            )
        )

    def recall(self, engine: EngineId, *, drain: bool) -> None:
        """Take back an engine that joined by this name; it gets no more steps.

        With `drain` it stops after its running steps; otherwise these go on elsewhere.
        """
        if not drain:
            self._cluster.recall(engine)
        self._deliver(EngineRecalled(time_s=self._clock.now_s, engine=engine, drain=drain))

    def begin_tool(self, trajectory: TrajectoryId, tool: str) -> None:
        """Begin a call whose action had no name yet; nothing if the trajectory has ended."""
        tracked = self._unnamed.pop(trajectory, None)
        if tracked is not None:
            self._begin_tool(tracked, tool)

    def update_weights(self, version: int, path: str) -> None:
        """Push other weights to every engine; steps under way go on under them."""
        self._cluster.update_weights(version, path)
        self._deliver(WeightsUpdated(time_s=self._clock.now_s, version=version))

    def update_engine(
        self,
        engine: EngineId,
        version: int,
        path: str,
        *,
        keep_kv: bool,
        then: Callable[[], None],
    ) -> None:
        """Push other weights to one engine; those that become ready later load them too.

        `then` is called when the engine has them; never if it ends before.
        """
        self._cluster.update_engine(engine, version, path, keep_kv=keep_kv, then=then)

    @property
    def engines(self) -> Sequence[EngineId]:
        """Engines that are ready, stopping ones included."""
        return tuple(self._cluster.engines)

    @property
    def computes(self) -> bool:
        """Whether any step runs on an engine."""
        return self._cluster.computes

    def deliver(self, event: Event) -> None:
        """Deliver an event of a service of `handlers`."""
        self._deliver(event)

    def abort_running(self, engine: EngineId) -> None:
        """End the running steps of an engine early, with their tokens kept."""
        self._cluster.abort_running(engine)

    def abort_step(self, trajectory: TrajectoryId) -> None:
        """End the running step of a trajectory early, with its tokens kept."""
        self._cluster.abort(trajectory)

    def pause(self) -> None:
        """Begin no dispatch until `resume`; running steps go on."""
        if self._held_dispatches is None:
            self._held_dispatches = []

    def resume(self) -> None:
        """Begin the dispatches that waited, in their order."""
        held, self._held_dispatches = self._held_dispatches, None
        for command in held or ():
            if command.engine in self._cluster.engines:  # else its failure has ended the command
                self._dispatch(command)

    def cancel(self, command: Cancel) -> None:
        """Close a trajectory as cancelled; its step and its tool call end without a report.

        One that has not arrived is closed when it does: the core expects all that are announced.
        """
        tracked = self._trajectories.get(command.trajectory)
        if tracked is not None and not tracked.arrived:
            tracked.cancelled = True
        elif tracked is not None:
            self._tools.cancel(tracked.id)
            self._finish(tracked, "cancelled")
            self._cluster.abort(tracked.id)

    def interrupt(self, drain_s: float) -> None:
        """End early: engines hand over the tokens of running steps, for `drain_s` at most.

        Then every trajectory that has arrived is cancelled, and all rollouts are over.
        """
        self._interrupted = True
        try:
            self._cluster.abort_all()
        except BaseException:
            self._cancel_all()
            raise
        if self._cluster.computes:
            self._clock.call_after(drain_s, self._cancel_all)
        else:
            self._cancel_all()

    def close(self) -> None:
        """Deliver nothing any more and cancel all tool calls. The launcher ends the engines."""
        self._closed = True
        self._tools.close()

    # -- events in, commands out -----------------------------------------------------------------

    def _deliver(self, event: Event) -> None:
        """Deliver an event, then execute its commands; events caused meanwhile are queued."""
        if self._closed:
            return
        if self._delivering:
            self._events.append(event)
            return
        self._delivering = True
        try:
            handle, events = self._core.handle, self._events
            while True:
                for command in handle(event):
                    if not self._interrupted or isinstance(command, Cancel):
                        self._handlers[type(command)](command)
                    # Else every trajectory is about to be cancelled, which ends the command.
                if not events:
                    break
                event = events.popleft()
        except BaseException as error:
            # The caller, such as an event loop, would at most log it.
            self.service_failed(error)
            return
        finally:
            self._delivering = False
        deadline_s = self._core.deadline_s
        if deadline_s is not None and deadline_s != self._tick_at:
            self._tick_at = deadline_s
            self._clock.call_at(deadline_s, self._tick, deadline_s)
        if not self._rollouts:
            self._become_idle()
        elif not self._tools.active:
            self._check_soon()

    def _stop(self, command: StopEngine) -> None:
        """Stop an engine; its dispatches that a pause holds back have not begun, and end."""
        held = self._held_dispatches or []
        for each in [dispatch for dispatch in held if dispatch.engine == command.engine]:
            held.remove(each)
            if each.trajectory in self._trajectories:
                self._deliver(
                    StepPreempted(
                        time_s=self._clock.now_s,
                        trajectory=each.trajectory,
                        step=each.step,
                        engine=each.engine,
                        output_tokens=0,
                    )
                )
        self._cluster.stop(command)

    def _migrate(self, command: Migrate) -> None:
        tracked = self._trajectories.get(command.trajectory)
        if tracked is not None:
            agent = tracked.agent
            self._cluster.migrations.migrate(command, agent.group, agent.context_ids)
            return
        # It was cancelled with others. Its TrajectoryFinished is on its way, and this comes after.
        self._deliver(
            MigrationFinished(
                time_s=self._clock.now_s,
                trajectory=command.trajectory,
                source=command.source,
                target=command.target,
                ok=False,
                kv_tokens=0,
                way="none",
            )
        )

    def _predict(self, command: Predict) -> None:
        self._requests += 1
        self._predictions.predict(command, self)

    def _solve(self, command: SolvePlan) -> None:
        self._requests += 1
        self._solver.solve(command, self)

    def _tick(self, deadline_s: float) -> None:
        if deadline_s == self._tick_at:
            self._tick_at = None
            self._deliver(Tick(time_s=self._clock.now_s))

    def _sample_later(self) -> None:
        if self._report_interval_s > 0 and not self._samples:
            self._samples = True
            self._clock.call_after(self._report_interval_s, self._sample)

    def _sample(self) -> None:
        """Sample until nothing will happen before the next agent: engines do not change then."""
        self._samples = False
        if self._closed:
            return
        samples = self._cluster.sample()
        if samples:
            self._clock.call_after(self._report_delay_s, self._cluster.report, samples)
        if samples or self._busy():
            self._sample_later()

    # -- one trajectory: step, tool, step ... ------------------------------------------------------

    def _arrive(self, tracked: _Trajectory) -> None:
        if self._interrupted:
            return
        if self._clock.frozen:
            # The first engines count as ready before the run: no arrival comes earlier.
            self._held.append(tracked)
            return
        self._arriving -= 1
        tracked.arrived = True
        agent = tracked.agent
        self._deliver(
            TrajectoryArrived(
                time_s=self._clock.now_s,
                rollout=tracked.rollout.id,
                trajectory=agent.id,
                group=agent.group,
                task=agent.task,
                prompt_tokens=agent.prompt_tokens,
                hints=getattr(agent, "hints", None),
            )
        )
        if tracked.cancelled:
            self._finish(tracked, "cancelled")

    def _arrive_held(self) -> None:
        held, self._held = self._held, []
        for tracked in held:
            self._arrive(tracked)

    def _dispatch(self, command: Dispatch) -> None:
        tracked = self._trajectories.get(command.trajectory)
        if tracked is None or tracked.cancelled:
            return  # it was cancelled with others: its TrajectoryFinished is on its way
        if self._held_dispatches is not None:
            self._held_dispatches.append(command)
            return
        request, limit = tracked.agent.request(), command.max_tokens
        tracked.limit_tokens = 0
        # A live model may end a step at the limit by chance, and no result says which it was.
        if limit is not None and limit < request.max_tokens and request.exact:
            tracked.keeps_kv = self._cluster.prefills_only(command.engine)
            request = msgspec.structs.replace(request, max_tokens=limit, keep_kv=tracked.keeps_kv)
            tracked.limit_tokens = limit
        refused = self._cluster.dispatch(command, request)
        if refused:
            result = StepResult(
                trajectory=command.trajectory, tokens=0, finished=True, error=refused
            )
            self._step_ended(command.engine, result)

    def _salvage(self, trajectory: TrajectoryId, result: StepResult | None) -> bool:
        """Hand an agent the tokens of a lost step; return whether its trajectory goes on."""
        tracked = self._trajectories.get(trajectory)
        if result is not None:
            if tracked is not None:
                self._keep_tokens(tracked, result)
            else:
                self._on_tokens_lost(trajectory, result.tokens)  # it was cancelled meanwhile
        return tracked is not None

    def _keep_tokens(self, tracked: _Trajectory, result: StepResult) -> NextAction | None:
        """Hand an agent its tokens; after a step without an error, read its next action.

        An engine calls this. A defect of an agent must not fail the engine: it ends the run.
        """
        try:
            tracked.agent.on_step_end(result)
            return tracked.agent.next_action() if result.finished and not result.error else None
        except Exception as error:
            self.service_failed(error)
            return None

    def _step_ended(self, engine: EngineId, result: StepResult) -> None:
        tracked = self._trajectories.get(result.trajectory)
        if tracked is None:
            self._on_tokens_lost(result.trajectory, result.tokens)  # it was cancelled meanwhile
            if self._cluster.prefills_only(engine):
                self._cluster.keep(result.trajectory, engine)
                self._cluster.let_go(result.trajectory)
            return
        if 0 < tracked.limit_tokens <= result.tokens and not result.error:
            result = msgspec.structs.replace(result, finished=False)
            if tracked.keeps_kv:
                self._cluster.keep(tracked.id, engine)
        action = self._keep_tokens(tracked, result)
        if not result.finished:
            self._deliver(
                StepPreempted(
                    time_s=self._clock.now_s,
                    trajectory=result.trajectory,
                    step=tracked.step,
                    engine=engine,
                    output_tokens=result.tokens,
                    queued_s=result.queued_s,
                    prefill_s=result.prefill_s,
                    decode_s=result.decode_s,
                    cached_tokens=result.cached_tokens,
                    recomputes=result.recomputes,
                )
            )
        else:
            self._deliver(
                StepFinished(
                    time_s=self._clock.now_s,
                    trajectory=result.trajectory,
                    step=tracked.step,
                    engine=engine,
                    output_tokens=result.tokens,
                    reason=action.reason if action is not None else "error",
                    queued_s=result.queued_s,
                    prefill_s=result.prefill_s,
                    decode_s=result.decode_s,
                    cached_tokens=result.cached_tokens,
                    recomputes=result.recomputes,
                )
            )
            self._continue(tracked, action)
        if self._interrupted and not self._cluster.computes:
            self._cancel_all()

    def _continue(self, tracked: _Trajectory, action: NextAction | None) -> None:
        """Run the tool that a step ended in, or close the trajectory."""
        if action is None:
            self._finish(tracked, "failed")
        elif action.tool is None:
            self._finish(tracked, action.outcome)
        elif action.tool_follows:
            self._unnamed[tracked.id] = tracked
        else:
            self._begin_tool(tracked, action.tool)

    def _begin_tool(self, tracked: _Trajectory, tool: str) -> None:
        tracked.tool = tool
        self._deliver(
            ToolStarted(
                time_s=self._clock.now_s, trajectory=tracked.id, step=tracked.step, tool=tool
            )
        )
        if self._closed:
            return
        try:
            self._tools.call(tracked.agent, tool, tracked.step)
        except Exception as error:
            self.service_failed(error)

    def tool_returned(self, trajectory: TrajectoryId, answer: ToolAnswer) -> None:
        tracked = self._trajectories.get(trajectory)
        if tracked is None:
            self._check_soon()
            return
        if answer.outcome is not None:
            self._finish(tracked, answer.outcome)
            return
        self._cluster.migrations.tool_returned(trajectory)
        tracked.step += 1
        self._deliver(
            ToolReturned(
                time_s=self._clock.now_s,
                trajectory=trajectory,
                step=tracked.step - 1,
                tool=tracked.tool,
                ok=answer.ok,
                observation_tokens=answer.observation_tokens,
                context_tokens=answer.context_tokens,
            )
        )

    def tool_failed(self, trajectory: TrajectoryId, error: BaseException) -> None:
        self.service_failed(error)

    def _finish(self, tracked: _Trajectory, outcome: Outcome) -> None:
        trajectory, rollout = tracked.id, tracked.rollout
        if self._trajectories.pop(trajectory, None) is None:
            return
        rollout.unfinished -= 1
        self._unnamed.pop(trajectory, None)
        self._cluster.let_go(trajectory)
        self._deliver(
            TrajectoryFinished(time_s=self._clock.now_s, trajectory=trajectory, outcome=outcome)
        )
        self._end_if_over(rollout)

    # -- services ---------------------------------------------------------------------------------

    def predicted(self, command: Predict, remaining_tokens: float | None) -> None:
        self._requests -= 1
        self._deliver(
            Predicted(
                time_s=self._clock.now_s,
                trajectory=command.trajectory,
                step=command.step,
                remaining_tokens=remaining_tokens,
            )
        )

    def plan_solved(self, command: SolvePlan, plan: ResourcePlan) -> None:
        self._requests -= 1
        self._deliver(PlanSolved(time_s=self._clock.now_s, plan=command.plan, resource_plan=plan))

    def service_failed(self, error: BaseException) -> None:
        """End the run with an error of the core, an agent or a service; the first one counts."""
        if not self._closed:
            self._closed = True
            self._on_error(error)

    # -- ends -------------------------------------------------------------------------------------

    def _open(self, rollout: RolloutId) -> _Rollout:
        state = self._rollouts.get(rollout)
        if state is None:
            raise RolloutError(f"rollout {rollout} is not open")
        return state

    def _end_if_over(self, rollout: _Rollout) -> None:
        if rollout.complete and not rollout.unfinished:
            self._rollouts.pop(rollout.id, None)
            if not (self._rollouts or self._delivering):
                self._become_idle()

    def _become_idle(self) -> None:
        stopping = self._cluster.stopping and not self._interrupted
        if not (self._idle or self._closed or stopping):
            self._idle = True
            self._on_idle()

    def _cancel_all(self) -> None:
        if self._closed or self._idle:
            return
        for tracked in list(self._trajectories.values()):
            if tracked.arrived:
                self._finish(tracked, "cancelled")
        self._trajectories.clear()
        self._rollouts.clear()
        self._become_idle()

    def _busy(self) -> bool:
        """Whether anything will happen without another call from outside."""
        return bool(
            self._tools.active
            or self._unnamed
            or self._arriving
            or self._requests
            or self._tick_at is not None
            or self._held_dispatches
            or self._cluster.busy
        )

    def _check_soon(self) -> None:
        """Check later whether the run is stuck: the caller may have more to do."""
        if not (self._check_is_due or self._idle or self._busy()):
            self._check_is_due = True
            self._clock.call_after(0.0, self._check)

    def _is_all_here(self) -> bool:
        """Whether no more agents will be admitted before something else happens."""
        if self._expects_agents is not None:
            return not self._expects_agents()
        return all(rollout.complete for rollout in self._rollouts.values())

    def _check(self) -> None:
        self._check_is_due = False
        stuck = bool(self._trajectories) and not (self._interrupted or self._busy())
        if stuck and self._is_all_here():
            failure = self._cluster.last_failure
            self.service_failed(
                StuckError(
                    f"{len(self._trajectories)} trajectories cannot go on at "
                    f"{self._clock.now_s:.1f} s: {len(self._cluster.engines)} engines are alive "
                    "and nothing is running"
                    + (f"; the last to fail was {failure}" if failure else "")
                )
            )
