"""Decides when, where and how every step runs, in every open rollout.

This file may not read a clock, do I/O, draw an unseeded number or depend on an engine's type.
Events come in, commands go out, and nothing else changes the ledger. It is the only caller of a
policy's parts.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from heddle_core.commands import Command, CommandList, Migrate, Predict, SolvePlan
from heddle_core.engine_state import Engine
from heddle_core.events import (
    EngineFailed,
    EngineJoined,
    EngineReady,
    EngineRecalled,
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
from heddle_core.homes import PlannedHomes
from heddle_core.hooks import Hooks
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.ledger import Ledger, LedgerError
from heddle_core.plans import (
    Disaggregation,
    EngineSpec,
    PlanProblem,
    ResourcePlan,
    RestartLimit,
)
from heddle_core.policy import Policy, predictions_awaited
from heddle_core.prefill import PrefillChoice
from heddle_core.queues import Queues
from heddle_core.retention import Retention
from heddle_core.rollouts import ARRIVAL_GRACE_S, Rollout, Rollouts
from heddle_core.trajectory import Trajectory


class Controller:
    """Makes all decisions, in the simulator and on real engines."""

    def __init__(
        self,
        policy: Policy,
        disaggregation: Disaggregation | None = None,
        restarts: RestartLimit | None = None,
    ) -> None:
        """With `disaggregation`, the policy's engines decode, and others prefill for them."""
        self.policy = policy
        self.ledger = Ledger()
        self.rollouts = Rollouts()
        self._hooks = Hooks.of(policy)
        self._prefill = PrefillChoice(disaggregation, self.ledger)
        self._queues = Queues(policy, self.ledger, self._hooks, self._prefill)
        self._retention = Retention()
        self._arrivals_due_s: float | None = None
        """When a rollout starts with the trajectories that have arrived."""
        self._review_due_s: float | None = None
        """When the placement reviews its backlog."""
        self._events = 0
        """Number of events so far: the sequence number of the next."""
        self._plans = 0
        self._searches: dict[int, Rollout | None] = {}
        """Running searches by number, and the rollout of each; None for a consolidation."""
        self._newest_plan = 0
        """Number of the search whose plan is or will be in force; 0 for a plan without search."""
        self._predict_requests: dict[tuple[TrajectoryId, int], int] = {}
        """Output tokens at the moment of each open request, by trajectory and step."""
        self._fleet = Fleet(restarts)
        self._homes = PlannedHomes(self.ledger, self._queues)
        self._awaits = predictions_awaited(policy.predictor)
        self._on: dict[type[Event], Callable[[Any, CommandList], None]] = {
            EngineFailed: self._on_engine_failed,
            EngineJoined: self._on_engine_joined,
            EngineReady: self._on_engine_ready,
            EngineRecalled: self._on_engine_recalled,
            EngineReported: self._on_engine_reported,
            EngineStopped: self._on_engine_stopped,
            MigrationFinished: self._on_migration_finished,
            PlanSolved: self._on_plan_solved,
            Predicted: self._on_predicted,
            RolloutClosed: self._on_rollout_closed,
            RolloutStarted: self._on_rollout_started,
            StepFinished: self._on_step_finished,
            StepPreempted: self._on_step_preempted,
            Tick: self._on_tick,
            ToolReturned: self._on_tool_returned,
            ToolStarted: self._on_tool_started,
            TrajectoryArrived: self._on_arrived,
            TrajectoryFinished: self._on_trajectory_finished,
            WeightsUpdated: self._on_weights_updated,
        }
        """What each event does; one lookup, since a chain of cases costs more than the event."""

    def handle(self, event: Event) -> tuple[Command, ...]:
        """Take one event in; return the commands it causes."""
        if event.time_s != self.ledger.now_s:
            self.ledger.advance(event.time_s)
        out = CommandList()
        out.cause = self._events
        self._events += 1
        self._on[type(event)](event, out)
        return tuple(out)

    @property
    def deadline_s(self) -> float | None:
        """A driver delivers a `Tick` no later than this."""
        due_s, review_s = self._arrivals_due_s, self._review_due_s
        if review_s is not None and (due_s is None or review_s < due_s):
            due_s = review_s
        if self._retention.ends:
            next_s = self._retention.next_s
            if next_s is not None and (due_s is None or next_s < due_s):
                due_s = next_s
        return due_s

    @property
    def events(self) -> int:
        """Events so far: the number of the next."""
        return self._events

    def skip_event(self) -> None:
        """Count an event of the run that is none of a rollout's."""
        self._events += 1

    # -- one trajectory's round: step, tool, step ... -------------------------------------------

    def _on_arrived(self, e: TrajectoryArrived, out: CommandList) -> None:
        rollout = self.rollouts.accepting(e.rollout)
        t = Trajectory(
            id=e.trajectory,
            rollout=e.rollout,
            group=e.group,
            task=e.task,
            weights_version=rollout.weights_version,
            prompt_tokens=e.prompt_tokens,
            tier=e.hints.tier if e.hints is not None else 0,
            arrived_s=e.time_s,
            context_tokens=e.prompt_tokens,
            runnable_s=e.time_s,
        )
        self.ledger.add_trajectory(t)
        if e.hints is not None and e.hints.home:
            self._homes.plan(t, e.hints.home)
        self._review_later()
        rollout.arrived += 1
        self.ledger.estimate(t, self.policy.predictor.remaining_tokens(t))
        if rollout.complete:
            self._all_arrived(rollout, out)
        else:
            self._release_held(out)

    def _on_step_finished(self, e: StepFinished, out: CommandList) -> None:
        t, engine = self.ledger.running(e.trajectory, e.step, e.engine)
        self.ledger.end_run(t, engine, e.output_tokens)
        self.ledger.move(t, "tool")
        if self.policy.admission.keeps_kv and not engine.prefills_only:
            t.keep_until_s = math.inf
            self.ledger.park(t, engine)
        for observe in self._hooks.observe_step:
            observe(t, e)
        self._queues.fill(engine, out)
        self._homes.preempt_next(engine, out)
        self._release_backlog(out)

    def _on_step_preempted(self, e: StepPreempted, out: CommandList) -> None:
        t, engine = self.ledger.running(e.trajectory, e.step, e.engine)
        self.ledger.end_run(t, engine, e.output_tokens)
        if engine.prefills_only:
            self._prefill_ended(t, engine, e, out)
        elif engine.accepting and not self._homes.can_move(t) and not self._hooks.chunk_tokens:
            self._queues.enqueue(t, engine)
        else:
            self._homes.place(t, out)
        self._queues.fill(engine, out)
        self._homes.preempt_next(engine, out)
        self._release_backlog(out)

    def _prefill_ended(
        self, t: Trajectory, engine: Engine, e: StepPreempted, out: CommandList
    ) -> None:
        """Queue a step at its home; its KV stays on the prefill engine until it has a slot there.

        Without a token, its prefill was aborted, and begins again.
        """
        if e.output_tokens:
            self.ledger.keep_prefilled(t, engine)
        home = self.ledger.engine(t.home) if t.home is not None else None
        if home is None or not home.accepting or self._homes.can_move(t):
            self._homes.place(t, out)
        else:
            self._queues.run_at(t, home, out)

    def _on_tool_started(self, e: ToolStarted, out: CommandList) -> None:
        t = self.ledger.in_tool(e.trajectory, e.step)
        t.tool_started_s = e.time_s
        self._limit_retention(t, e.tool, out)
        predictor = self.policy.predictor
        if predictor.served:
            estimate = predictor.remaining_tokens(t)
            self._predict_requests[t.id, t.step] = t.output_tokens
            t.predictions_due += 1
            out.append(Predict(trajectory=t.id, step=t.step, estimate=estimate, cause=out.cause))
        else:
            self.ledger.estimate(t, predictor.remaining_tokens(t))
            self._consider_migration(t, out)

    def _on_tool_returned(self, e: ToolReturned, out: CommandList) -> None:
        t = self.ledger.in_tool(e.trajectory, e.step)
        t.tool_s += e.time_s - t.tool_started_s
        t.step += 1
        if e.context_tokens < t.context_tokens + e.observation_tokens:
            t.home_kv_tokens = 0  # the agent compacted its history
        t.context_tokens = e.context_tokens
        t.runnable_s = e.time_s
        for observe in self._hooks.observe_tool:
            observe(t, e)
        if self._awaits and (t.id, e.step) in self._predict_requests:
            self.ledger.move(t, "predicting")
        else:
            self._leave_tool(t, out)

    def _leave_tool(self, t: Trajectory, out: CommandList) -> None:
        """Place a trajectory whose tool has returned, or let it wait for its KV."""
        left = self.ledger.unpark(t)
        t.kv_kept = left is not None
        if t.migrating_to is None:
            self._place_after_tool(t, out)
        if t.migrating_to is not None and t.phase != "pulling":
            self.ledger.move(t, "migrating")
        if left is not None and (t.phase == "migrating" or left.id != t.engine):
            self._queues.fill(left, out)

    def _place_after_tool(self, t: Trajectory, out: CommandList) -> None:
        """Queue the next step where it is placed, or begin to move its KV there."""
        engine, carries_kv = self._homes.choose(t), self._hooks.carries_kv
        if engine is None:
            self.ledger.hold(t)
        elif (
            carries_kv is not None
            and t.home is not None
            and t.home != engine.id
            and self.ledger.engine(t.home).alive
            and t.context_tokens < engine.kv_capacity_tokens
            and carries_kv(t, engine, self.ledger)
        ):
            t.migrating_to = engine.id
            out.append(Migrate(trajectory=t.id, source=t.home, target=engine.id, cause=out.cause))
        else:
            self._queues.run_at(t, engine, out)

    def _limit_retention(self, t: Trajectory, tool: str, out: CommandList) -> None:
        """Keep the KV of a trajectory in a tool for as long as the admission part says."""
        keep_kv_s = self._hooks.keep_kv_s
        if keep_kv_s is None or not t.parked:
            return
        seconds = keep_kv_s(t, tool, self.ledger)
        if seconds <= 0.0:
            t.keep_until_s = self.ledger.now_s
            self._end_retention(t, out)
        elif seconds < math.inf:
            self._retention.keep(t, self.ledger.now_s + seconds)

    def _end_retention(self, t: Trajectory, out: CommandList) -> None:
        engine = self.ledger.unpark(t)
        if engine is not None:
            self._queues.fill(engine, out)

    def _on_trajectory_finished(self, e: TrajectoryFinished, out: CommandList) -> None:
        t = self.ledger.trajectory(e.trajectory)
        engine = self.ledger.engine(t.engine) if t.engine is not None else None
        prefilled_on = self.ledger.drop_prefilled(t)
        self.ledger.finish(t)
        self._queues.backlog.pop(t.id, None)
        for observe in self._hooks.observe_finish:
            observe(t)
        self.policy.placement.finished(t)
        self.policy.migration.finished(t)
        self._homes.forget(t)
        rollout = self.rollouts.end(t)
        for freed in (engine, prefilled_on):
            if freed is not None:
                self._queues.fill(freed, out)
        self._release_backlog(out)
        if not self._close_if_over(rollout):
            self._consider_consolidation(out)

    def _on_predicted(self, e: Predicted, out: CommandList) -> None:
        t = self.ledger.answered(e.trajectory)
        tokens_at_request = self._predict_requests.pop((t.id, e.step), None)
        if tokens_at_request is None:
            raise LedgerError(f"no prediction of step {e.step} of {t.id!r} is due")
        made_since = t.output_tokens - tokens_at_request
        t.predictions_due -= 1
        if t.phase == "finished":
            self.ledger.release(t)
            return
        if e.remaining_tokens is not None:
            # The prediction holds as of its request; subtract the tokens generated since.
            self.ledger.estimate(t, max(0.0, e.remaining_tokens - made_since))
        if t.phase == "predicting":
            if e.remaining_tokens is not None:
                self._consider_migration(t, out)
            self._leave_tool(t, out)
        elif e.remaining_tokens is None:
            return
        elif t.phase == "tool" and t.step == e.step:
            self._consider_migration(t, out)
        elif t.phase == "queued" and t.engine is not None:
            engine = self.ledger.engine(t.engine)
            self._queues.enqueue(t, engine)
            self._queues.fill(engine, out, may_preempt=True)

    def _on_migration_finished(self, e: MigrationFinished, out: CommandList) -> None:
        t = self.ledger.answered(e.trajectory)
        if t.migrating_to != e.target:
            raise LedgerError(f"{t.id!r} does not migrate to engine {e.target!r}")
        t.migrating_to = None
        if t.phase == "finished":
            self.ledger.release(t)
            return
        if t.phase == "pulling":
            self._pulled(t, e, out)
            return
        source, target = self.ledger.engine(e.source), self.ledger.engine(e.target)
        if e.ok and target.accepting:
            self.ledger.set_home(t, target.id)
            t.home_kv_tokens = min(e.kv_tokens, t.context_tokens)
            keeps_kv = self.policy.admission.keeps_kv and t.keep_until_s > e.time_s
            if t.phase == "tool" and keeps_kv:
                self.ledger.park(t, target)
        elif not source.accepting:
            self.ledger.set_home(t, target.id if target.accepting else None)
        if t.phase == "migrating":
            # The migration placed this step; placing it again could send it straight back.
            if t.home is None:
                self._queues.place(t, out)
            else:
                self._queues.run_at(t, self.ledger.engine(t.home), out)
        self._queues.fill(source, out)

    def _pulled(self, t: Trajectory, e: MigrationFinished, out: CommandList) -> None:
        """Dispatch a step whose KV has come, or has been lost on the way: it is prefilled then."""
        engine = self.ledger.engine(e.target)
        freed: Engine | None = None
        if t.prefills_on is None:
            freed = self.ledger.drop_prefilled(t)
            t.home_kv_tokens = min(e.kv_tokens, t.context_tokens) if e.ok else 0
        self._queues.dispatch_pulled(t, engine, out)
        if freed is not None:
            self._queues.fill(freed, out)

    def _withdraw_pulling(self, engine: Engine) -> None:
        """Steps that wait in a slot of an engine that closes are placed anew after their move."""
        for t in list(engine.running.values()):
            if t.phase == "pulling":
                self.ledger.end_run(t, engine, 0)
                self.ledger.move(t, "migrating")
                if t.home == engine.id:
                    self.ledger.set_home(t, None)

    def _consider_migration(self, t: Trajectory, out: CommandList) -> None:
        if t.home is None or t.migrating_to is not None or not self.ledger.engines:
            return
        if self._homes.can_move(t):
            promised = self._homes.pop(t)
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
        """Give homes to held trajectories of running rollouts once the engines are ready."""
        ledger, placement = self.ledger, self.policy.placement
        if not (self._fleet.settled and ledger.engines and ledger.held):
            return
        rollouts = self.rollouts.open
        held = [t for t in ledger.held.values() if rollouts[t.rollout].stage == "running"]
        for t in held:
            engine = self._homes.pop(t)
            if engine is not None:
                self._queues.run_at(t, engine, out)
        backlog = self._queues.backlog
        rest = [t for t in held if t.phase == "held" and t.id not in backlog]
        if placement.needs_all and len(rest) > 1:
            remaining = [t.remaining_tokens for t in rest]
            for t, home in zip(rest, placement.assign(rest, remaining, ledger), strict=True):
                self._queues.run_at(t, ledger.engine(home), out)
        else:
            for t in rest:
                self._queues.place(t, out)
        self._release_backlog(out)

    def _release_backlog(self, out: CommandList, *, review: bool = False) -> None:
        """Let the placement choose steps of its backlog that go to an engine now."""
        release, backlog = self._hooks.release, self._queues.backlog
        if release is None or not (backlog or review) or not self.ledger.engines:
            return
        while chosen := release(backlog, self.ledger):
            for t, name in chosen:
                engine = self.ledger.engine(name)
                assert engine.accepting, f"the backlog releases to {name!r}, which takes no work"
                self._queues.run_at(backlog[t], engine, out)

    # -- engines and plans -----------------------------------------------------------------------

    def _on_rollout_started(self, e: RolloutStarted, out: CommandList) -> None:
        rollout = self.rollouts.start(e)
        self.ledger.weights_version = e.weights_version
        policy = self.policy
        waits = policy.placement.needs_all or policy.planner.needs_all
        if rollout.complete or rollout.announced is None or not waits:
            self._all_arrived(rollout, out)
        else:
            self._arrivals_due_s = self.rollouts.wait_until(rollout, e.time_s + ARRIVAL_GRACE_S)

    def _on_rollout_closed(self, e: RolloutClosed, out: CommandList) -> None:
        rollout = self.rollouts.announce(e)
        if rollout.complete:
            self._all_arrived(rollout, out)

    def _on_tick(self, e: Tick, out: CommandList) -> None:
        now_s = self.ledger.now_s
        for rollout in self.rollouts.waiting(now_s):
            self._all_arrived(rollout, out)
        for t in self._retention.ended(now_s):
            self._end_retention(t, out)
        if self._review_due_s is not None and self._review_due_s <= now_s:
            self._review_due_s = None
            self._review_later()
            self._release_backlog(out, review=True)

    def _review_later(self) -> None:
        """Let the placement review its backlog while there are trajectories and engines."""
        ledger, review_s = self.ledger, self._hooks.review_s
        if review_s and self._review_due_s is None and ledger.trajectories and ledger.engines:
            self._review_due_s = ledger.now_s + review_s

    def _all_arrived(self, rollout: Rollout, out: CommandList) -> None:
        """Plan or place the trajectories that have arrived: all, or those before the deadline."""
        self._arrivals_due_s = self.rollouts.wait_until(rollout, None)
        if rollout.stage == "awaiting":
            self._plan(rollout, out)
        self._release_held(out)
        self._close_if_over(rollout)

    def _close_if_over(self, rollout: Rollout) -> bool:
        """Keep only the name of a rollout in which all have ended."""
        if not rollout.over or rollout.stage == "closed":
            return False
        self.rollouts.close(rollout)
        return True

    def _plan(self, rollout: Rollout, out: CommandList) -> None:
        ts = [t for t in self.ledger.held.values() if t.rollout == rollout.id]
        plan = self.policy.planner.plan(ts, [t.remaining_tokens for t in ts])
        if isinstance(plan, ResourcePlan):
            rollout.stage = "running"
            self._newest_plan = 0
            self._carry_out(plan, out)
        else:
            rollout.stage = "planning"
            self._search(plan, rollout, out)

    def _consider_consolidation(self, out: CommandList) -> None:
        """Ask for other engines once all have arrived and while the fleet is at rest."""
        part, fleet = self.policy.consolidation, self._fleet
        if self._searches or fleet.gave_up or not (fleet.steady and self.ledger.engines):
            return
        if not self.rollouts.settled:
            return
        problem = part.consolidate(self.ledger)
        if problem is not None:
            self._search(problem, None, out)

    def _search(self, problem: PlanProblem, rollout: Rollout | None, out: CommandList) -> None:
        self._plans += 1
        self._searches[self._plans] = rollout
        self._newest_plan = self._plans
        out.append(SolvePlan(plan=self._plans, problem=problem, cause=out.cause))

    def _on_plan_solved(self, e: PlanSolved, out: CommandList) -> None:
        if e.plan not in self._searches:
            raise LedgerError(f"no search for plan {e.plan} is under way")
        rollout = self._searches.pop(e.plan)
        if rollout is not None:
            rollout.stage = "closed" if rollout.over else "running"
        elif not (self._fleet.steady and self.rollouts.settled):
            return  # the engines or trajectories of this consolidation have changed since
        if e.plan == self._newest_plan:
            self._carry_out(e.resource_plan, out)
        self._release_held(out)

    def _carry_out(self, plan: ResourcePlan, out: CommandList) -> None:
        plan = self._prefill.with_prefill_engines(plan)
        draining, carriers = self._fleet.change_to(plan, out)
        self._homes.replace({carriers[name]: members for name, members in plan.homes})
        self._clear(draining, out)
        for engine in list(self.ledger.engines):
            self._homes.pull_members(engine, out)

    def _clear(self, draining: Sequence[EngineId], out: CommandList) -> None:
        """Find other homes for what waits on engines that stop."""
        closed = [self.ledger.engine(name) for name in draining]
        for engine in closed:
            self.ledger.close_engine(engine)
            self._withdraw_pulling(engine)
        for engine in closed:
            for t in self._unqueue_all(engine):
                self._homes.place(t, out)
            self._homes.preempt_next(engine, out)

    # -- engines of others, and on borrowed GPUs ---------------------------------------------------

    def borrow_engines(self, engines: Sequence[EngineSpec], out: CommandList) -> list[EngineId]:
        """Start engines on GPUs that are the rollouts' for a while; return their ids.

        As each is ready, it takes its share of the unfinished trajectories. No engine is widened
        while one is borrowed.
        """
        return self._fleet.borrow(engines, out)

    def give_back_engines(self, engines: Sequence[EngineId], out: CommandList) -> None:
        """Stop borrowed engines that are ready. Running steps keep their tokens and move."""
        for name in engines:
            engine = self.ledger.engine(name)
            self.ledger.close_engine(engine)
            self._withdraw_pulling(engine)
            self._fleet.give_back(name, out)
        for name in engines:
            engine = self.ledger.engine(name)
            for t in self._unqueue_all(engine):
                self._homes.place(t, out)

    def _on_engine_joined(self, e: EngineJoined, out: CommandList) -> None:
        spec = EngineSpec(engine=e.engine, shape=e.shape, max_running=e.max_running)
        self._fleet.join(spec, out)

    def _on_engine_recalled(self, e: EngineRecalled, out: CommandList) -> None:
        name = self._fleet.recall(e.engine.name, out, drain=e.drain)
        engine = self.ledger.known_engines.get(name) if name is not None else None
        if engine is not None and engine.accepting:
            engine.recalled = True
            self._clear([engine.id], out)

    def _share_with(self, engine: Engine) -> list[TrajectoryId]:
        """Unfinished trajectories for an engine that no plan has: as many for a GPU as elsewhere.

        Those with the least context come, since their prefill is repeated. Several engines may be
        borrowed at once, so one that is about to move counts where it goes.
        """
        engines = self.ledger.engines
        gpus = sum(e.shape.gpus for e in engines)
        by_home: dict[EngineId, list[Trajectory]] = {}
        for t in self.ledger.trajectories.values():
            home = self._homes.present(t)
            if home is not None and t.phase in ("running", "queued", "tool"):
                by_home.setdefault(home, []).append(t)
        members: list[TrajectoryId] = []
        for home, ts in by_home.items():
            e = self.ledger.engine(home)
            if e.accepting and e is not engine:
                ts.sort(key=lambda t: t.context_tokens)
                fair = len(ts) * (gpus - engine.shape.gpus) // gpus
                members += [t.id for t in ts[: len(ts) - fair]]
        return members

    # -- engines -----------------------------------------------------------------------------------

    def _on_engine_ready(self, e: EngineReady, out: CommandList) -> None:
        engine = Engine(
            id=e.engine,
            shape=e.shape,
            max_running=e.max_running,
            kv_capacity_tokens=e.kv_capacity_tokens,
        )
        self.ledger.add_engine(engine)
        self._review_later()
        if not self._fleet.ready(e.engine, out):
            self.ledger.close_engine(engine)
        elif not self._fleet.plans(e.engine):
            self._homes.add(e.engine, self._share_with(engine))
        self._release_held(out)
        self._homes.pull_members(engine, out)

    def _on_engine_reported(self, e: EngineReported, out: CommandList) -> None:
        self.ledger.report(e.engine, e.kv_used_tokens, e.preemptions)

    def _on_weights_updated(self, e: WeightsUpdated, out: CommandList) -> None:
        self.ledger.weights_version = e.version
        for t in self.ledger.trajectories.values():
            t.home_kv_tokens = 0

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
            self._withdraw_pulling(engine)
            lost = list(engine.running.values())
            prefills = engine.prefills_only
            for t in lost:
                self.ledger.end_run(t, engine, made.get(t.id, 0))
                self.ledger.hold(t, at_home=prefills)
            lost += self._unqueue_all(engine)
            self._abandon_homes(engine)
        self._fleet.failed(e.engine, e.time_s, out)
        for t in lost:
            home = self.ledger.engine(t.home) if t.home is not None else None
            if home is not None and home.accepting:
                self._queues.run_at(t, home, out)
            else:
                self._queues.place(t, out)
        self._release_held(out)

    def _unqueue_all(self, engine: Engine) -> list[Trajectory]:
        waiting = sorted(engine.waiting(), key=lambda t: t.ticket)
        for t in waiting:
            self.ledger.unqueue(t, engine)
            self.ledger.hold(t, at_home=engine.prefills_only)
        return waiting

    def _abandon_homes(self, engine: Engine) -> None:
        """Clear the home of trajectories that are not there: its KV is gone; they get another
        later.
        """
        if engine.sessions:
            for t in self.ledger.trajectories.values():
                away = t.phase in ("tool", "predicting", "migrating") or t.prefills_on is not None
                if t.home == engine.id and away:
                    self.ledger.set_home(t, None)
        if engine.prefilled_kv_tokens:
            for t in self.ledger.trajectories.values():
                if t.prefilled_on == engine.id:
                    self.ledger.drop_prefilled(t)
