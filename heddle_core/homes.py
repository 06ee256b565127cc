"""Homes that a plan assigned to trajectories: each moves there as soon as it can.

A waiting trajectory moves at once. Running ones are preempted, one on each engine at a time. One in
a tool moves at its next tool call or when its tool returns. This file is part of the controller: it
reads no clock and does no I/O.
"""

from collections.abc import Mapping, Sequence

from heddle_core.commands import CommandList, Preempt
from heddle_core.engine_state import Engine
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.ledger import Ledger
from heddle_core.queues import Queues
from heddle_core.trajectory import Trajectory


class PlannedHomes:
    """Homes of the latest plan that have not been taken yet."""

    def __init__(self, ledger: Ledger, queues: Queues) -> None:
        self._ledger, self._queues = ledger, queues
        self._members: Mapping[EngineId, Sequence[TrajectoryId]] = {}
        self._homes: dict[TrajectoryId, EngineId] = {}

    def replace(self, members: Mapping[EngineId, Sequence[TrajectoryId]]) -> None:
        """Take a new plan's members of each engine; those of earlier plans are void."""
        self._members = members
        self._homes = {t: engine for engine, ts in members.items() for t in ts}

    def add(self, engine: EngineId, members: Sequence[TrajectoryId]) -> None:
        """Plan homes on one more engine; those on others stay."""
        self._members = {**self._members, engine: members}
        for t in members:
            self._homes[t] = engine

    def plan(self, t: Trajectory, engine: EngineId) -> None:
        self._homes[t.id] = engine

    def forget(self, t: Trajectory) -> None:
        """`t` has ended."""
        self._homes.pop(t.id, None)

    def can_move(self, t: Trajectory) -> bool:
        """Whether `t` could move to its planned home now."""
        engine = self._ledger.known_engines.get(self._homes[t.id]) if t.id in self._homes else None
        return engine is not None and engine.accepting and engine.id != t.home

    def pop(self, t: Trajectory) -> Engine | None:
        """Remove the planned home of `t`; return it if it accepts work."""
        name = self._homes.pop(t.id, None)
        engine = self._ledger.known_engines.get(name) if name is not None else None
        return engine if engine is not None and engine.accepting else None

    def place(self, t: Trajectory, out: CommandList) -> None:
        """Queue a runnable trajectory at its planned home, or where the policy places it."""
        engine = self.choose(t)
        if engine is None:
            self._ledger.hold(t)
        else:
            self._queues.run_at(t, engine, out)

    def present(self, t: Trajectory) -> EngineId | None:
        """Where `t` is, or is about to move."""
        return self._homes[t.id] if self.can_move(t) else t.home

    def choose(self, t: Trajectory) -> Engine | None:
        """Return the planned home of `t`, or the policy's choice; None: it waits."""
        planned = self.pop(t) if self._homes and self.can_move(t) else None
        return planned if planned is not None else self._queues.choose(t)

    def pull_members(self, engine: Engine, out: CommandList) -> None:
        """`engine` is ready: bring its members from their present homes."""
        for name in self._members.get(engine.id, ()):
            t = self._ledger.trajectories.get(name)
            if t is None or t.home is None or not self.can_move(t):
                continue
            home = self._ledger.engine(t.home)
            if t.phase in ("running", "preempting"):
                self.preempt_next(home, out)
            elif t.phase == "queued" and t.prefills_on is None:
                self._ledger.unqueue(t, home)
                self._ledger.hold(t)
                self.place(t, out)

    def preempt_next(self, engine: Engine, out: CommandList) -> None:
        """Preempt the next step of `engine` whose planned home is another engine."""
        if (engine.accepting and not self._homes) or engine.preempting or engine.recalled:
            return
        if engine.prefills_only:
            return  # its steps are short, and move to other homes as they end
        for t in engine.running.values():
            if t.phase == "running" and (not engine.accepting or self.can_move(t)):
                self._ledger.begin_preemption(t, engine)
                out.append(Preempt(trajectory=t.id, step=t.step, engine=engine.id, cause=out.cause))
                return
