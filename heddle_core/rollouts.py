"""Named rollouts: each is a small state machine, and several may be open at once.

    awaiting   engines or placement wait until every announced trajectory has arrived
    planning   a search for engines is under way
    running    trajectories are placed as they arrive
    closed     every trajectory has ended; only its name is left

Engines are planned as each rollout starts. The newest plan is in force, and trajectories of older
rollouts go on where it puts them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from heddle_core.events import RolloutClosed, RolloutStarted
from heddle_core.ids import RolloutId
from heddle_core.ledger import LedgerError
from heddle_core.trajectory import Trajectory

Stage: TypeAlias = Literal["awaiting", "planning", "running", "closed"]

ARRIVAL_GRACE_S = 30.0
"""Seconds that a rollout waits for announced arrivals: one failed sampler must not block it."""


@dataclass(slots=True, eq=False, kw_only=True)
class Rollout:
    id: RolloutId
    weights_version: int
    announced: int | None
    """Announced number of trajectories; None while any number may arrive."""
    stage: Stage = "awaiting"
    arrived: int = 0
    ended: int = 0
    deadline_s: float | None = None
    """When it starts with the trajectories that have arrived; None when it does not wait."""

    @property
    def complete(self) -> bool:
        """Whether every trajectory has arrived."""
        return self.announced is not None and self.arrived >= self.announced

    @property
    def over(self) -> bool:
        """Whether every trajectory has arrived and ended."""
        return self.complete and self.ended == self.arrived


class Rollouts:
    """The rollouts of a run: open ones by name, and the names of closed ones."""

    def __init__(self) -> None:
        self.open: dict[RolloutId, Rollout] = {}
        self.closed: set[RolloutId] = set()

    @property
    def settled(self) -> bool:
        """Whether some rollout is open and all of every open one has arrived and been placed."""
        rollouts = self.open.values()
        return bool(rollouts) and all(r.stage == "running" and r.complete for r in rollouts)

    def start(self, event: RolloutStarted) -> Rollout:
        """Open a rollout.

        Raises:
            LedgerError: the name was used before, or fewer than no trajectories are announced.
        """
        if event.trajectories is not None and event.trajectories < 0:
            raise LedgerError(f"rollout {event.rollout!r} announces {event.trajectories}")
        if event.rollout in self.open or event.rollout in self.closed:
            raise LedgerError(f"rollout {event.rollout!r} started twice")
        rollout = Rollout(
            id=event.rollout,
            weights_version=event.weights_version,
            announced=event.trajectories,
        )
        self.open[rollout.id] = rollout
        return rollout

    def get(self, rollout: RolloutId) -> Rollout:
        """Return an open rollout; refuses any other."""
        found = self.open.get(rollout)
        if found is None:
            state = "is closed" if rollout in self.closed else "never started"
            raise LedgerError(f"rollout {rollout!r} {state}")
        return found

    def announce(self, event: RolloutClosed) -> Rollout:
        """Take the final number of trajectories; refuses one below the arrivals so far."""
        rollout = self.get(event.rollout)
        if event.trajectories < rollout.arrived:
            raise LedgerError(
                f"rollout {rollout.id!r} closes with {event.trajectories} trajectories, but "
                f"{rollout.arrived} have arrived"
            )
        rollout.announced = event.trajectories
        return rollout

    def accepting(self, rollout: RolloutId) -> Rollout:
        """Return an open rollout in which trajectories may still arrive; refuses any other."""
        found = self.get(rollout)
        if found.complete:
            raise LedgerError(f"rollout {rollout!r} has {found.announced} trajectories, not more")
        return found

    def end(self, t: Trajectory) -> Rollout:
        """Count a trajectory's end in its rollout, and return the rollout."""
        rollout = self.open[t.rollout]
        rollout.ended += 1
        return rollout

    def close(self, rollout: Rollout) -> None:
        """Keep only the name of a rollout that is over."""
        rollout.stage = "closed"
        del self.open[rollout.id]
        self.closed.add(rollout.id)

    def wait_until(self, rollout: Rollout, deadline_s: float | None) -> float | None:
        """Set or clear the deadline of an open rollout; return the earliest of all."""
        rollout.deadline_s = deadline_s
        deadlines = [r.deadline_s for r in self.open.values() if r.deadline_s is not None]
        return min(deadlines, default=None)

    def waiting(self, now_s: float) -> Iterable[Rollout]:
        """Open rollouts whose deadline has passed."""
        return [r for r in self.open.values() if r.deadline_s is not None and now_s >= r.deadline_s]
