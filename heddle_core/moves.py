"""Homes that a plan promised: taken at once by who waits, by the others as soon as they can move.

Who runs is asked to leave, one on each engine at a time; who is in a tool moves when it begins the
next or returns. Like the controller, of which this is a part, it reads no clock and does no I/O.
"""

from collections.abc import Mapping, Sequence

from heddle_core.commands import CommandList, Preempt
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.ledger import Engine, Ledger, Trajectory
from heddle_core.queues import Queues


class Moves:
    """Promises of the latest plan that have not been kept yet."""

    def __init__(self, ledger: Ledger, queues: Queues) -> None:
        self._ledger, self._queues = ledger, queues
        self._members: Mapping[EngineId, Sequence[TrajectoryId]] = {}
        self._homes: dict[TrajectoryId, EngineId] = {}

    def promise(self, members: Mapping[EngineId, Sequence[TrajectoryId]]) -> None:
        """Promise each engine's members that it will be their home; earlier promises are void."""
        self._members = members
        self._homes = {t: engine for engine, ts in members.items() for t in ts}

    def forget(self, t: Trajectory) -> None:
        """`t` has ended."""
        self._homes.pop(t.id, None)

    def elsewhere(self, t: Trajectory) -> bool:
        """Whether `t` could move to its promised home now."""
        engine = self._ledger.known_engines.get(self._homes[t.id]) if t.id in self._homes else None
        return engine is not None and engine.accepting and engine.id != t.home

    def take(self, t: Trajectory) -> Engine | None:
        """Return the promised home if it takes work; the promise is kept, or broken."""
        name = self._homes.pop(t.id, None)
        engine = self._ledger.known_engines.get(name) if name is not None else None
        return engine if engine is not None and engine.accepting else None

    def place(self, t: Trajectory, out: CommandList) -> None:
        """Queue a runnable trajectory at its promised home, or where the policy places it."""
        engine = self.take(t) if self.elsewhere(t) else None
        if engine is None:
            self._queues.place(t, out)
        else:
            self._queues.run_at(t, engine, out)

    def fetch(self, engine: Engine, out: CommandList) -> None:
        """`engine` is ready: bring those to whom it was promised."""
        for name in self._members.get(engine.id, ()):
            t = self._ledger.trajectories.get(name)
            if t is None or t.home is None or not self.elsewhere(t):
                continue
            home = self._ledger.engine(t.home)
            if t.phase == "running":
                self.clear(home, out)
            elif t.phase == "queued":
                self._ledger.unqueue(t, home)
                self._ledger.hold(t)
                self.place(t, out)

    def clear(self, engine: Engine, out: CommandList) -> None:
        """Ask the next of those who are to go on elsewhere to leave `engine`."""
        if (engine.accepting and not self._homes) or engine.leaving or not self._ledger.engines:
            return
        for t in engine.running.values():
            if not engine.accepting or self.elsewhere(t):
                self._ledger.ask_to_leave(t, engine)
                out.append(Preempt(trajectory=t.id, step=t.step, engine=engine.id, cause=out.cause))
                return
