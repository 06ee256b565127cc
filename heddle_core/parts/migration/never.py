"""Homes never move while a tool runs."""

from mypy_extensions import mypyc_attr

from heddle_core.ids import EngineId
from heddle_core.policy import TrajectoryView, View


@mypyc_attr(allow_interpreted_subclasses=True)
class Never:
    """Every trajectory keeps its home until its next step is placed."""

    def target(self, t: TrajectoryView, remaining_tokens: float, view: View) -> EngineId | None:
        """Return None: stay."""
        return None

    def finished(self, t: TrajectoryView) -> None:
        """Forget nothing: nothing was kept."""
