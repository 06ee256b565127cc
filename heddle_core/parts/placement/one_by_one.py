"""Base of placements that decide for one step at a time, when it becomes runnable."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from heddle_core.ids import EngineId
from heddle_core.policy import TrajectoryView, View


@mypyc_attr(allow_interpreted_subclasses=True)
class OneByOne(ABC):
    """A placement that never waits for the whole rollout and by default keeps no state."""

    needs_all: bool = False

    @abstractmethod
    def place(self, t: TrajectoryView, view: View) -> EngineId | None:
        """Home for one runnable step; None if it has to wait."""
        ...

    def assign(
        self, ts: Sequence[TrajectoryView], remaining: Sequence[float], view: View
    ) -> Sequence[EngineId]:
        """Homes in the given order, each chosen independently; the first engine for who waits."""
        return [self.place(t, view) or view.engines[0].id for t in ts]

    def finished(self, t: TrajectoryView) -> None:
        """Forget nothing: nothing was kept."""
        return
