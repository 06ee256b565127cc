"""Homes never move while a tool runs."""

from heddle_core.ids import EngineId
from heddle_core.policy import TrajectoryView, View


class Never:
    """Every trajectory keeps its home until its next step is placed."""

    def target(self, t: TrajectoryView, remaining_tokens: float, view: View) -> EngineId | None:
        """Return None: stay."""
        return None

    def finished(self, t: TrajectoryView) -> None:
        """Forget nothing: nothing was kept."""
