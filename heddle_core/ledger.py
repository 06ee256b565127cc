"""The only mutable state: the phase and home of each trajectory. Only the controller changes it.

Policies read it as a `View`. This file decides nothing. A method records a fact or raises
`LedgerError`: a driver broke the protocol. A bad choice of a policy never raises it.
"""

from heapq import heappop, heappush

from mypy_extensions import mypyc_attr

from heddle_core.engine_state import Engine
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.tournament import Tournament
from heddle_core.trajectory import TRANSITIONS, Phase, Trajectory

RUNNING = ("running", "preempting")
"""Phases of a trajectory whose step runs."""
IN_SLOT = ("pulling", *RUNNING)
"""Phases of a trajectory that has a slot."""


@mypyc_attr(native_class=False)
class LedgerError(RuntimeError):
    """An event contradicts the recorded state: a defect in a driver."""


class Ledger:
    """Every trajectory and engine, and the moves between phases."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.weights_version = 0
        self.trajectories: dict[TrajectoryId, Trajectory] = {}
        """Unfinished ones, in order of arrival."""
        self.ended: dict[TrajectoryId, Trajectory] = {}
        """Finished ones that still await the end of a migration or a prediction."""
        self.known_engines: dict[EngineId, Engine] = {}
        self.engines: list[Engine] = []
        """Engines that accept work, in the order in which they became ready; all but those that
        only prefill."""
        self.prefill_engines: list[Engine] = []
        """Engines that only prefill and accept work, in that order too."""
        self.held: dict[TrajectoryId, Trajectory] = {}
        """Trajectories without a home that wait for one, in order of arrival."""
        self.ended_s = 0.0
        """When the last trajectory so far ended."""
        self.most_running = 0
        """The most steps that any engine has run at once."""
        self._tickets = 0
        self._arrivals = 0
        self._loads: Tournament[Engine] | None = None
        """Of `engines` by steps in flight; None before the first question after a change."""
        self._changed: list[Engine] = []
        """Engines whose load has changed since the last question."""

    @property
    def unfinished(self) -> int:
        """Trajectories that have arrived and not ended."""
        return len(self.trajectories)

    def engine(self, engine: EngineId) -> Engine:
        """Return one engine, dead or alive."""
        found = self.known_engines.get(engine)
        if found is None:
            raise LedgerError(f"engine {engine!r} was never ready")
        return found

    def trajectory(self, trajectory: TrajectoryId) -> Trajectory:
        found = self.trajectories.get(trajectory)
        if found is None:
            raise LedgerError(f"trajectory {trajectory!r} never arrived, or has finished")
        return found

    def answered(self, trajectory: TrajectoryId) -> Trajectory:
        """Return the trajectory of a late answer, finished or not."""
        return self.ended.get(trajectory) or self.trajectory(trajectory)

    def move(self, t: Trajectory, phase: Phase) -> None:
        """Change a trajectory's phase; refuses what `TRANSITIONS` does not list."""
        if phase not in TRANSITIONS[t.phase]:
            raise LedgerError(f"{t.id!r} cannot go from {t.phase!r} to {phase!r}")
        t.phase = phase

    def estimate(self, t: Trajectory, remaining_tokens: float) -> None:
        """Take a new estimate of a trajectory's remaining output."""
        t.remaining_tokens = remaining_tokens

    def running(
        self, trajectory: TrajectoryId, step: int, engine: EngineId
    ) -> tuple[Trajectory, Engine]:
        """Return a trajectory and the engine its `step` runs on; refuses if it runs elsewhere."""
        t = self.trajectories.get(trajectory) or self.trajectory(trajectory)
        if t.phase not in RUNNING or (t.prefills_on or t.home) != engine or t.step != step:
            raise LedgerError(
                f"step {step} of {t.id!r} ended on engine {engine!r}, but the trajectory is "
                f"{t.phase} in step {t.step} at engine {t.engine!r}"
            )
        return t, self.known_engines[engine]

    def in_tool(self, trajectory: TrajectoryId, step: int) -> Trajectory:
        """Return a trajectory whose `step` ended in a tool call; refuses any other."""
        t = self.trajectories.get(trajectory) or self.trajectory(trajectory)
        if t.phase != "tool" or t.step != step:
            raise LedgerError(
                f"the tool of step {step} of {t.id!r} reports, but the trajectory is {t.phase} "
                f"in step {t.step}"
            )
        return t

    def fewest_in_flight(self) -> Engine:
        """Return the engine with the fewest steps in flight, the first of equals."""
        loads = self._loads
        if loads is None:
            for place, engine in enumerate(self.engines):
                engine.place = place
            loads = self._loads = Tournament(self.engines, [e.in_flight for e in self.engines])
        else:
            for engine in self._changed:
                if engine.accepting and not engine.prefills_only:
                    loads.change(engine.place, engine.in_flight)
        for engine in self._changed:
            engine.load_changed = False
        self._changed.clear()
        return loads.winner()

    def _count(self, engine: Engine, steps: int) -> None:
        """Add to the steps in flight."""
        engine.in_flight += steps
        if not engine.load_changed:
            engine.load_changed = True
            self._changed.append(engine)

    def advance(self, time_s: float) -> None:
        """Move the clock; refuses to go back."""
        if not time_s >= self.now_s:
            raise LedgerError(f"time runs backwards: {time_s} after {self.now_s}")
        self.now_s = time_s

    def add_engine(self, engine: Engine) -> None:
        if engine.id in self.known_engines:
            raise LedgerError(f"engine {engine.id!r} is ready twice")
        self.known_engines[engine.id] = engine
        if engine.prefills_only:
            self.prefill_engines.append(engine)
            return
        self.engines.append(engine)
        self._loads = None

    def report(self, engine: EngineId, kv_used_tokens: int, preemptions: int = 0) -> None:
        """Keep an engine's sample of its own counters."""
        e = self.engine(engine)
        e.reported_s, e.reported_kv_used_tokens = self.now_s, kv_used_tokens
        e.reported_preemptions = preemptions

    def close_engine(self, engine: Engine) -> None:
        """No new work goes to `engine`; what runs there may end."""
        if engine.accepting:
            engine.accepting = False
            if engine.prefills_only:
                self.prefill_engines.remove(engine)
                return
            self.engines.remove(engine)
            self._loads = None

    def add_trajectory(self, t: Trajectory) -> None:
        """Record an arrival; it is held until it has a home."""
        if t.id in self.trajectories or t.id in self.ended:
            raise LedgerError(f"trajectory {t.id!r} arrived twice")
        t.arrival = self._arrivals
        self._arrivals += 1
        self.trajectories[t.id] = t
        self.held[t.id] = t

    def hold(self, t: Trajectory, *, at_home: bool = False) -> None:
        """Keep a runnable trajectory that has no engine to wait for."""
        if not at_home:
            self.set_home(t, None)
        if t.phase != "held":
            self.move(t, "held")
            self.held[t.id] = t

    def begin_cancel(self, t: Trajectory) -> None:
        """A Cancel is under way: no engine can hold it."""
        self.hold(t)
        del self.held[t.id]
        self.move(t, "cancelling")

    def park(self, t: Trajectory, engine: Engine) -> None:
        """Reserve the KV of a trajectory in a tool."""
        t.parked = True
        t.estimated_kv_tokens = t.context_tokens
        engine.parked_kv_tokens += t.context_tokens

    def unpark(self, t: Trajectory) -> Engine | None:
        """Release its reserved KV; return the engine on which it is free again."""
        if not t.parked or t.home is None:
            return None
        t.parked = False
        engine = self.known_engines[t.home]
        engine.parked_kv_tokens -= t.estimated_kv_tokens
        return engine

    def set_home(self, t: Trajectory, home: EngineId | None) -> None:
        """Move a home; sessions follow."""
        if t.home == home:
            return
        self.unpark(t)
        elsewhere = t.prefills_on is not None
        if t.home is not None:
            before = self.known_engines[t.home]
            before.sessions -= 1
            if elsewhere:
                self._count(before, -1)
        if home is not None:
            after = self.engine(home)
            after.sessions += 1
            if elsewhere:
                self._count(after, 1)
        t.home = home
        t.home_kv_tokens = 0

    def enqueue(self, t: Trajectory, engine: Engine, priority: float) -> None:
        """Put a homed, runnable trajectory in an engine's queue, or give it a new key there."""
        if t.ticket < 0:
            self.held.pop(t.id, None)
            self.move(t, "queued")
            self._count(engine, 1)
            if engine.prefills_only:
                self._begin_prefill(t, engine)
        self._tickets += 1
        t.ticket = self._tickets
        t.priority = priority
        heappush(engine.queue, (-priority, self._tickets, t))

    def _begin_prefill(self, t: Trajectory, engine: Engine) -> None:
        """Its step goes to a prefill engine first; it is in flight at its home all the same."""
        t.prefills_on = engine.id
        t.prefill_tokens = t.context_tokens - t.home_kv_tokens
        engine.prefill_tokens += t.prefill_tokens
        if t.home is not None:
            self._count(self.known_engines[t.home], 1)

    def _end_prefill(self, t: Trajectory, engine: Engine) -> None:
        t.prefills_on = None
        engine.prefill_tokens -= t.prefill_tokens
        if t.home is not None:
            self._count(self.known_engines[t.home], -1)

    def keep_prefilled(self, t: Trajectory, engine: Engine) -> None:
        """A prefill engine keeps the KV of a step for the engine that decodes it."""
        t.prefilled_on, t.prefilled_kv_tokens = engine.id, t.context_tokens
        engine.prefilled_kv_tokens += t.context_tokens

    def drop_prefilled(self, t: Trajectory) -> Engine | None:
        """That KV is needed no more; return the engine on which it is free again."""
        if t.prefilled_on is None:
            return None
        engine = self.known_engines[t.prefilled_on]
        engine.prefilled_kv_tokens -= t.prefilled_kv_tokens
        t.prefilled_on = None
        return engine

    def unqueue(self, t: Trajectory, engine: Engine) -> None:
        """Take a trajectory out of a queue; its entry goes stale."""
        t.ticket = -1
        self._count(engine, -1)
        if t.prefills_on is not None:
            self._end_prefill(t, engine)

    def start(self, t: Trajectory, engine: Engine, phase: Phase = "running") -> None:
        """The head of the queue takes a slot."""
        heappop(engine.queue)
        t.ticket = -1
        self.move(t, phase)
        t.dispatched_s = self.now_s
        t.estimated_kv_tokens = t.context_tokens + t.reserved_tokens
        engine.estimated_kv_tokens += t.estimated_kv_tokens
        engine.running[t.id] = t
        if len(engine.running) > self.most_running:
            self.most_running = len(engine.running)

    def end_run(self, t: Trajectory, engine: Engine, output_tokens: int) -> None:
        """A dispatch ended with `output_tokens` made; the slot is free."""
        if output_tokens < 0:
            raise LedgerError(f"{t.id!r} made {output_tokens} tokens on engine {engine.id!r}")
        if engine.running.pop(t.id, None) is None:
            raise LedgerError(f"trajectory {t.id!r} does not run on engine {engine.id!r}")
        engine.estimated_kv_tokens -= t.estimated_kv_tokens
        self._count(engine, -1)
        if t.phase == "preempting":
            engine.preempting -= 1
        t.output_tokens += output_tokens
        t.context_tokens += output_tokens
        if t.prefills_on is not None:
            self._end_prefill(t, engine)
        elif output_tokens:
            t.home_kv_tokens = t.context_tokens
        t.remaining_tokens = max(0.0, t.remaining_tokens - output_tokens)

    def begin_preemption(self, t: Trajectory, engine: Engine) -> None:
        """A Preempt is under way."""
        self.move(t, "preempting")
        engine.preempting += 1

    def finish(self, t: Trajectory) -> None:
        """End the trajectory, from any phase."""
        self.unpark(t)
        self.drop_prefilled(t)
        if t.engine is not None:
            engine = self.known_engines[t.engine]
            if t.phase == "queued":
                self.unqueue(t, engine)
            elif t.phase in IN_SLOT:
                self.end_run(t, engine, 0)
        self.held.pop(t.id, None)
        self.set_home(t, None)
        self.move(t, "finished")
        self.ended_s = self.now_s
        del self.trajectories[t.id]
        self.ended[t.id] = t
        self.release(t)

    def release(self, t: Trajectory) -> None:
        """Remove a finished trajectory that awaits no migration and no prediction."""
        if t.phase == "finished" and t.migrating_to is None and not t.predictions_due:
            del self.ended[t.id]

    def check(self) -> None:
        """Assert the invariants that a state alone can show (docs/architecture.md 1, 3, 8, 9)."""
        sessions: dict[EngineId, int] = dict.fromkeys(self.known_engines, 0)
        queued: dict[EngineId, int] = dict.fromkeys(self.known_engines, 0)
        running: dict[EngineId, int] = dict.fromkeys(self.known_engines, 0)
        parked: dict[EngineId, int] = dict.fromkeys(self.known_engines, 0)
        prefilled: dict[EngineId, int] = dict.fromkeys(self.known_engines, 0)
        elsewhere: dict[EngineId, int] = dict.fromkeys(self.known_engines, 0)
        for t in self.trajectories.values():
            if t.home is not None:
                sessions[t.home] += 1
                parked[t.home] += t.estimated_kv_tokens if t.parked else 0
            self._check_trajectory(t)
            if t.phase == "queued" or t.phase in IN_SLOT:
                assert t.engine is not None, f"{t.id} is {t.phase} without an engine"
                assert self.known_engines[t.engine].alive, f"{t.id} is {t.phase} on a dead engine"
                (queued if t.phase == "queued" else running)[t.engine] += 1
                if t.prefills_on is not None and t.home is not None:
                    elsewhere[t.home] += 1
            else:
                assert t.prefills_on is None, f"{t.id} is {t.phase} and prefills"
            if t.prefilled_on is not None:
                assert t.prefills_on is None, f"{t.id} is prefilled and prefills"
                prefilled[t.prefilled_on] += t.prefilled_kv_tokens
            if t.phase in IN_SLOT:
                assert t.engine is not None
                assert t.id in self.known_engines[t.engine].running
        for t in self.ended.values():
            assert t.phase == "finished", f"{t.id} ended but is {t.phase}"
            assert t.migrating_to is not None or t.predictions_due, f"{t.id} awaits nothing"
        for e in self.known_engines.values():
            assert e.sessions == sessions[e.id], f"{e.id} counts {e.sessions} sessions"
            assert len(list(e.waiting())) == queued[e.id], f"{e.id} queue disagrees with phases"
            assert len(e.running) == running[e.id], f"{e.id} running disagrees with phases"
            in_flight = queued[e.id] + running[e.id] + elsewhere[e.id]
            assert e.in_flight == in_flight, f"{e.id} miscounts in flight"
            assert e.prefilled_kv_tokens == prefilled[e.id], f"{e.id} miscounts KV kept for others"
            assert len(e.running) <= e.max_running, f"{e.id} exceeds its slots"
            kv = sum(t.estimated_kv_tokens for t in e.running.values())
            assert kv == e.estimated_kv_tokens, f"{e.id} miscounts KV"
            assert kv <= e.kv_capacity_tokens or len(e.running) == 1, f"{e.id} exceeds its KV"
            assert e.parked_kv_tokens == parked[e.id], f"{e.id} miscounts parked KV"
            assert e.preempting == sum(t.phase == "preempting" for t in e.running.values())
            assert e.preempting <= 1, f"{e.id} has more than one preemption under way"
            place = self.prefill_engines if e.prefills_only else self.engines
            assert (e in place) == e.accepting, f"{e.id} accepting disagrees"
            assert e.alive or not (e.accepting or e.in_flight), f"{e.id} is dead and has work"
        if self.engines:
            fewest = min(self.engines, key=lambda e: e.in_flight)
            assert self.fewest_in_flight() is fewest, f"{fewest.id} has the fewest in flight"

    def _check_trajectory(self, t: Trajectory) -> None:
        assert not t.parked or t.phase in ("tool", "predicting"), f"{t.id} is parked but {t.phase}"
        assert (t.phase == "held") == (t.id in self.held), f"{t.id}: {t.phase} and held disagree"
        assert (t.phase == "queued") == (t.ticket >= 0), f"{t.id}: {t.phase} and ticket disagree"
        assert t.phase != "finished", f"{t.id} is finished and still here"
        if t.phase in ("migrating", "pulling"):
            assert t.migrating_to is not None, f"{t.id} waits for no migration"
        if t.phase == "predicting":
            assert t.predictions_due, f"{t.id} waits for no prediction"
            assert t.migrating_to is None, f"{t.id} waits for a prediction and a migration"
