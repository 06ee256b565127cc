"""Served: any predictor behind a service, so that its estimates take time."""

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.policy import Predictor, TrajectoryView


class Served:
    """The same estimates as `inner`, requested by `Predict` and delivered by `Predicted`.

    The controller requests one when a tool starts. The driver charges the latency of the service,
    which overlaps with the tool. Until `Predicted`, the last estimate minus the output since is
    valid. When the tool returns first, `awaited` decides: the next step waits for the prediction,
    which can then migrate it, or the step is queued at once and a late prediction only reorders
    the queue.
    """

    served = True

    def __init__(self, inner: Predictor, *, awaited: bool = False) -> None:
        self.inner = inner
        self.awaited = awaited

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        self.inner.observe_step(t, event)

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        self.inner.observe_tool(t, event)

    def observe_finish(self, t: TrajectoryView) -> None:
        self.inner.observe_finish(t)

    def remaining_tokens(self, t: TrajectoryView) -> float:
        """Return what `inner` estimates."""
        return self.inner.remaining_tokens(t)
