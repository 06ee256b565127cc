"""One predictor for the tasks that it knows, another for the rest."""

from collections.abc import Container

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.policy import Predictor, TrajectoryView


class ByTask:
    """A trained model knows its tasks, and is no better than a rule on others."""

    served = False

    def __init__(self, known: Predictor, tasks: Container[str], otherwise: Predictor) -> None:
        """Take the predictor of `tasks`, and that of all others; neither may be served."""
        self.inner = known
        self._tasks, self._otherwise = tasks, otherwise

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Learn from a finished generation."""
        self._of(t).observe_step(t, event)

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        """Learn from a tool's answer."""
        self._of(t).observe_tool(t, event)

    def observe_finish(self, t: TrajectoryView) -> None:
        """Learn from a trajectory's end."""
        self._of(t).observe_finish(t)

    def remaining_tokens(self, t: TrajectoryView) -> float:
        """Return the estimate of the one that is asked about this task."""
        return self._of(t).remaining_tokens(t)

    def _of(self, t: TrajectoryView) -> Predictor:
        return self.inner if t.task in self._tasks else self._otherwise
