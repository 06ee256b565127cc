"""Migration in batches only: a move that ends the whole sooner may delay those that are moved."""

from heddle_core.estimate.arrival_waves import ArrivalWaves
from heddle_core.ids import EngineId
from heddle_core.parts.migration.balance import Balance
from heddle_core.policy import PolicyContext, TrajectoryView, View


class BalanceBatches:
    """`Balance` while most unfinished trajectories came in one wave, else homes stay.

    Where others arrive all the time, new ones fill an engine that has fallen idle, without a move
    (`ArrivalWaves`).
    """

    def __init__(self, context: PolicyContext) -> None:
        self._waves = ArrivalWaves()
        self._ends = 0
        self.inner = Balance(context)

    def target(self, t: TrajectoryView, remaining_tokens: float, view: View) -> EngineId | None:
        """Return the engine to move to, or None to stay."""
        self._waves.arrived(self._ends + view.unfinished)
        return self.inner.target(t, remaining_tokens, view) if self._waves.batch else None

    def finished(self, t: TrajectoryView) -> None:
        """Count the end of a trajectory, and forget it."""
        self._ends += 1
        self._waves.ended(t.arrival)
        self.inner.finished(t)
