"""Decides when, where and how every step runs.

This file may not read a clock, do I/O, draw an unseeded number or know an engine's type: all it
learns comes in as events, all it wants goes out as commands, and nothing else changes the ledger.
It is the only caller of a policy's parts.
"""

from typing import assert_never

from heddle_core.commands import (
    Command,
    CommandList,
    Migrate,
    Predict,
    SolvePlan,
)
from heddle_core.events import (
    EngineFailed,
    EngineReady,
    EngineReported,
    EngineStopped,
    Event,
    MigrationFinished,
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
from heddle_core.fleet import Fleet
from heddle_core.ids import TrajectoryId
from heddle_core.ledger import Engine, Ledger, LedgerError, Trajectory
from heddle_core.moves import Moves
from heddle_core.plans import PlanProblem, ResourcePlan
from heddle_core.policy import Policy
from heddle_core.queues import Queues

ARRIVAL_GRACE_S = 30.0
"""How long a plan waits for promised arrivals: a dead sampler must not hold the rest for ever."""


class Controller:
    """The one object that decides, in the simulator as on real engines."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.ledger = Ledger()
        self._queues = Queues(policy, self.ledger)
        self.deadline_s: float | None = None
        """A driver delivers a `Tick` no later than this."""
        self._events = 0
        """Events so far; the sequence number of the next."""
        self._expected = 0
        self._arrived = 0
        self._plans = 0
        self._awaited = 0
        """Number of the plan that is being searched for; 0 for none."""
        self._planned = False
        self._asked: dict[tuple[TrajectoryId, int], int] = {}
        """Output made when the prediction service was asked, by trajectory and step."""
        self._fleet = Fleet()
        self._moves = Moves(self.ledger, self._queues)

    def handle(self, event: Event) -> tuple[Command, ...]:  # noqa: C901 -- one case per event
        """Take one event in; return the commands it causes."""
        self.ledger.advance(event.time_s)
        out = CommandList(self._events)
        self._events += 1
        match event:
            case StepFinished():
                self._on_step_finished(event, out)
            case ToolStarted():
                self._on_tool_started(event, out)
            case ToolReturned():
                self._on_tool_returned(event, out)
            case StepPreempted():
                self._on_step_preempted(event, out)
            case TrajectoryArrived():
                self._on_arrived(event, out)
            case TrajectoryFinished():
                self._on_trajectory_finished(event, out)
            case Predicted():
                self._on_predicted(event, out)
            case MigrationFinished():
                self._on_migration_finished(event, out)
            case EngineReported():
                self.ledger.report(event.engine, event.kv_used_tokens)
            case EngineReady():
                self._on_engine_ready(event, out)
            case EngineStopped():
                self._on_engine_stopped(event, out)
            case EngineFailed():
                self._on_engine_failed(event, out)
            case RolloutStarted():
                self._on_rollout_started(event, out)
            case PlanSolved():
                self._on_plan_solved(event, out)
            case RolloutClosed():
                self._expected = self._arrived
                self._all_arrived(out)
            case WeightsUpdated():
                self.ledger.weights_version = event.version
            case Tick():
                self._on_tick(out)
            case _:
                assert_never(event)
        return tuple(out)

    # -- one trajectory's round: step, tool, step ... -------------------------------------------

    def _on_arrived(self, e: TrajectoryArrived, out: CommandList) -> None:
        t = Trajectory(
            id=e.trajectory,
            group=e.group,
            task=e.task,
            weights_version=self.ledger.weights_version,
            prompt_tokens=e.prompt_tokens,
            arrived_s=e.time_s,
            context_tokens=e.prompt_tokens,
            runnable_s=e.time_s,
        )
        self.ledger.add_trajectory(t)
        t.remaining_tokens = self.policy.predictor.remaining_tokens(t)
        self._arrived += 1
        if self._arrived == self._expected:
            self._all_arrived(out)
        else:
            self._release_held(out)

    def _on_step_finished(self, e: StepFinished, out: CommandList) -> None:
        t, engine = self.ledger.running(e.trajectory, e.step, e.engine)
        self.ledger.end_run(t, engine, e.output_tokens)
        t.phase = "tool"
        if self.policy.admission.keeps_kv:
            self.ledger.park(t, engine)
        self.policy.predictor.observe_step(t, e)
        self._queues.fill(engine, out)
        self._moves.clear(engine, out)

    def _on_step_preempted(self, e: StepPreempted, out: CommandList) -> None:
        t, engine = self.ledger.running(e.trajectory, e.step, e.engine)
        self.ledger.end_run(t, engine, e.output_tokens)
        if engine.accepting and not self._moves.elsewhere(t):
            self._queues.enqueue(t, engine)
        else:
            self._moves.place(t, out)
        self._queues.fill(engine, out)
        self._moves.clear(engine, out)

    def _on_tool_started(self, e: ToolStarted, out: CommandList) -> None:
        t = self.ledger.in_tool(e.trajectory, e.step)
        t.tool_started_s = e.time_s
        predictor = self.policy.predictor
        if predictor.served:
            estimate = predictor.remaining_tokens(t)
            self._asked[t.id, t.step] = t.output_tokens
            out.append(Predict(trajectory=t.id, step=t.step, estimate=estimate, cause=out.cause))
        else:
            t.remaining_tokens = predictor.remaining_tokens(t)
            self._consider_migration(t, out)

    def _on_tool_returned(self, e: ToolReturned, out: CommandList) -> None:
        t = self.ledger.in_tool(e.trajectory, e.step)
        left = self.ledger.unpark(t)
        t.tool_s += e.time_s - t.tool_started_s
        t.step += 1
        t.context_tokens = e.context_tokens
        t.runnable_s = e.time_s
        self.policy.predictor.observe_tool(t, e)
        if t.migrating_to is not None:
            t.phase = "migrating"
        else:
            self._moves.place(t, out)
        if left is not None and (t.phase == "migrating" or left.id != t.home):
            self._queues.fill(left, out)

    def _on_trajectory_finished(self, e: TrajectoryFinished, out: CommandList) -> None:
        t = self.ledger.trajectory(e.trajectory)
        engine = self.ledger.engine(t.home) if t.home is not None else None
        self.ledger.finish(t)
        self.policy.predictor.observe_finish(t)
        self.policy.placement.finished(t)
        self.policy.migration.finished(t)
        self._moves.forget(t)
        if engine is not None:
            self._queues.fill(engine, out)
        self._consider_consolidation(out)

    def _on_predicted(self, e: Predicted, out: CommandList) -> None:
        t = self.ledger.trajectory(e.trajectory)
        made_since = t.output_tokens - self._asked.pop((t.id, e.step), t.output_tokens)
        if e.remaining_tokens is None or t.phase == "finished":
            return
        # A late answer speaks of the end of its step; what was made since is no longer ahead.
        t.remaining_tokens = max(0.0, e.remaining_tokens - made_since)
        if t.phase == "tool" and t.step == e.step:
            self._consider_migration(t, out)
        elif t.phase == "queued" and t.home is not None:
            engine = self.ledger.engine(t.home)
            self._queues.enqueue(t, engine)
            self._queues.fill(engine, out, may_preempt=True)

    def _on_migration_finished(self, e: MigrationFinished, out: CommandList) -> None:
        t = self.ledger.trajectory(e.trajectory)
        if t.migrating_to != e.target:
            raise LedgerError(f"{t.id!r} does not migrate to engine {e.target!r}")
        t.migrating_to = None
        if t.phase == "finished":
            return
        source, target = self.ledger.engine(e.source), self.ledger.engine(e.target)
        if e.ok and target.accepting:
            self.ledger.set_home(t, target.id)
            if t.phase == "tool" and self.policy.admission.keeps_kv:
                self.ledger.park(t, target)
        elif not source.accepting:
            self.ledger.set_home(t, target.id if target.accepting else None)
        if t.phase == "migrating":
            # The move was this step's placement: asking again could send it straight back.
            if t.home is None:
                self._queues.place(t, out)
            else:
                self._queues.run_at(t, self.ledger.engine(t.home), out)
        self._queues.fill(source, out)

    def _consider_migration(self, t: Trajectory, out: CommandList) -> None:
        if t.home is None or t.migrating_to is not None or not self.ledger.engines:
            return
        if self._moves.elsewhere(t):
            promised = self._moves.take(t)
            target = promised.id if promised is not None else None
        else:
            target = self.policy.migration.target(t, t.remaining_tokens, self.ledger)
        if target is None or target == t.home:
            return
        engine = self.ledger.engine(target)
        if engine.accepting and t.context_tokens < engine.kv_capacity_tokens:
            t.migrating_to = target
            out.append(Migrate(trajectory=t.id, source=t.home, target=target, cause=out.cause))

    # -- homes ----------------------------------------------------------------------------------

    def _release_held(self, out: CommandList) -> None:
        """Give homes to held trajectories once engines, plan and all awaited arrivals are in."""
        ledger, placement = self.ledger, self.policy.placement
        if not (self._planned and self._fleet.settled and ledger.engines and ledger.held):
            return
        held = [t for t in ledger.held.values() if not t.given_up]
        for t in held:
            engine = self._moves.take(t)
            if engine is not None:
                self._queues.run_at(t, engine, out)
        rest = [t for t in held if t.phase == "held" and not t.given_up]
        if placement.needs_all and len(rest) > 1:
            remaining = [t.remaining_tokens for t in rest]
            for t, home in zip(rest, placement.assign(rest, remaining, ledger), strict=True):
                self._queues.run_at(t, ledger.engine(home), out)
        else:
            for t in rest:
                self._queues.place(t, out)

    # -- engines and plans -----------------------------------------------------------------------

    def _on_rollout_started(self, e: RolloutStarted, out: CommandList) -> None:
        self.ledger.weights_version = e.weights_version
        self._expected, self._arrived, self._planned = e.trajectories or 0, 0, False
        self._awaited = 0
        if not (self.policy.planner.needs_all or self.policy.placement.needs_all):
            self._plan(out)
        elif e.trajectories == 0:
            self._all_arrived(out)
        else:
            self.deadline_s = e.time_s + ARRIVAL_GRACE_S

    def _on_tick(self, out: CommandList) -> None:
        if self.deadline_s is not None and self.ledger.now_s >= self.deadline_s:
            self._all_arrived(out)

    def _all_arrived(self, out: CommandList) -> None:
        self.deadline_s = None
        if not self._planned:
            self._plan(out)
        self._release_held(out)

    def _plan(self, out: CommandList) -> None:
        self._planned = True
        ts = [t for t in self.ledger.held.values() if not t.given_up]
        plan = self.policy.planner.plan(ts, [t.remaining_tokens for t in ts])
        if isinstance(plan, ResourcePlan):
            self._carry_out(plan, out)
        else:
            self._planned = False
            self._search(plan, out)

    def _consider_consolidation(self, out: CommandList) -> None:
        """Ask for other engines once all have arrived and while the fleet is at rest."""
        part = self.policy.consolidation
        if part is None or self._awaited or not (self._planned and self._fleet.steady):
            return
        if self._arrived < self._expected or not self.ledger.engines:
            return
        problem = part.consolidate(self.ledger)
        if problem is not None:
            self._search(problem, out)

    def _search(self, problem: PlanProblem, out: CommandList) -> None:
        self._plans += 1
        self._awaited = self._plans
        out.append(SolvePlan(plan=self._plans, problem=problem, cause=out.cause))

    def _on_plan_solved(self, e: PlanSolved, out: CommandList) -> None:
        if e.plan != self._awaited:
            return
        self._awaited = 0
        if self._planned and not self._fleet.steady:
            return  # a consolidation of engines that are no longer what they were
        self._planned = True
        self._carry_out(e.resource_plan, out)
        self._release_held(out)

    def _carry_out(self, plan: ResourcePlan, out: CommandList) -> None:
        leaving, carriers = self._fleet.change_to(plan, out)
        self._moves.promise({carriers[name]: members for name, members in plan.homes})
        closed = [self.ledger.engine(name) for name in leaving]
        for engine in closed:
            self.ledger.close_engine(engine)
        for engine in closed:
            for t in self._unqueue_all(engine):
                self._moves.place(t, out)
            self._moves.clear(engine, out)
        for engine in list(self.ledger.engines):
            self._moves.fetch(engine, out)

    def _on_engine_ready(self, e: EngineReady, out: CommandList) -> None:
        engine = Engine(
            id=e.engine,
            shape=e.shape,
            max_running=e.max_running,
            kv_capacity_tokens=e.kv_capacity_tokens,
        )
        self.ledger.add_engine(engine)
        if not self._fleet.ready(e.engine, out):
            self.ledger.close_engine(engine)
        self._release_held(out)
        self._moves.fetch(engine, out)

    def _on_engine_stopped(self, e: EngineStopped, out: CommandList) -> None:
        engine = self.ledger.engine(e.engine)
        if engine.running:
            raise LedgerError(f"engine {e.engine!r} stopped with steps running")
        engine.alive = False
        self._abandon_homes(engine)
        self._fleet.stopped(e.engine, out)

    def _on_engine_failed(self, e: EngineFailed, out: CommandList) -> None:
        engine = self.ledger.known_engines.get(e.engine)
        lost: list[Trajectory] = []
        if engine is not None:
            self.ledger.close_engine(engine)
            engine.alive = False
            made = dict(e.salvaged)
            lost = list(engine.running.values())
            for t in lost:
                self.ledger.end_run(t, engine, made.get(t.id, 0))
                self.ledger.hold(t)
            lost += self._unqueue_all(engine)
            self._abandon_homes(engine)
        self._fleet.failed(e.engine, out)
        for t in lost:
            self._queues.place(t, out)
        self._release_held(out)

    def _unqueue_all(self, engine: Engine) -> list[Trajectory]:
        waiting = sorted(engine.waiting(), key=lambda t: t.ticket)
        for t in waiting:
            self.ledger.unqueue(t, engine)
            self.ledger.hold(t)
        return waiting

    def _abandon_homes(self, engine: Engine) -> None:
        """Trajectories in a tool lose a home whose KV is gone; they get another on return."""
        if engine.sessions:
            for t in self.ledger.trajectories.values():
                if t.home == engine.id and t.phase in ("tool", "migrating"):
                    self.ledger.set_home(t, None)
